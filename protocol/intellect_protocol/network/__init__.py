"""Peers over py-libp2p: connections, discovery, gossip and requests.

Read in this order: `limits` (every bound and time-out), `compat` and `muxer` (what is corrected
in the library), `stream` and `host` (connections; `open_host` is the way in), `peers` (who behaves how),
`kad` and `discovery` (finding peers), `gossip` (announcements), `rpc`, `envelopes`, `rpc_server`
and `rpc_client` (requests), `binding` (the greeting that ties peer key and node key together).
"""
