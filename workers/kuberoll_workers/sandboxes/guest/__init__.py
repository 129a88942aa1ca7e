"""What runs inside a sandbox: a server of commands and files, on Python's standard library alone.

It comes into any image with an interpreter and a loader of its own (`sandboxes.runtime`), so nothing here may import
anything else. Its modules are also imported by the handle outside, which speaks the same frames.
"""
