"""A worker's way to the policy: the interface, the client of the Serve app, routing, and endpoints of others."""
