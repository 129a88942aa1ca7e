"""The way out of a machine whose network is an allowlist of hosts.

Such a machine has loopback only: no route, and no DNS. A port of its loopback leads to an HTTP proxy here, outside of
it, which decides by the names of hosts: `rules` says which are allowed, `addresses` where a name may lead, `messages`
what a request means, `client_hello` for whom TLS is meant. `connecting` and `relay` do so. `proxy` serves one machine,
whose programs find it by `variables`.
"""
