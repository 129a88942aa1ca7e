"""Programs that run in the sandbox: the checker, which has the tests, and the process that has the policy's code.

They are handed to the sandbox as text, `values` before each of the others, and import nothing of KubeRoll.
"""
