"""The gRPC server: it translates between the contract in `proto/` and `AsyncLLM`, and decides nothing itself.

To be read in this order: `server_config`, `orders` (what a message asks for), `answers` (what is sent back), `statuses`
(what an error becomes), `access` and `admission` (who may ask, and how much), `calls` (what is around each call),
`gateway` (a request on its way), `leases` (whose sessions there are), the services, `server`.
"""
