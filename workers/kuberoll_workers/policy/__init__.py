"""A worker's access to the policy: the interface, the client of the Serve app, routing, external endpoints."""
