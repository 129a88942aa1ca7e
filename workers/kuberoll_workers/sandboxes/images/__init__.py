"""Images of machines: found by a reference, unpacked once, a directory for each layer.

`references` reads what names an image, `registry`, `layouts` and `archives` fetch it, `manifests` reads what it
consists of, `layers` unpacks what nobody trusts, in a process without rights (`unpacker`), `store` keeps it, and
`overlay` puts the layers on top of each other.
"""
