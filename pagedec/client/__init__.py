"""A server's model from Python, without torch: `Client` is what `LLM` is, `AsyncClient` what `AsyncLLM` is.

Read `client` first, then `questions` and `handle` (what is asked), `asking` and `telling` (objects to messages and
back), `connection` and `failures`, `dropped`.
"""

from pagedec.client.asking import CustomParams, ServedLora, ServedTrie
from pagedec.client.async_client import AsyncClient
from pagedec.client.async_remote_session import AsyncRemoteBranch, AsyncRemoteSession
from pagedec.client.client import Client
from pagedec.client.failures import ServerError
from pagedec.client.remote_session import RemoteBranch, RemoteSession

__all__ = [
    "AsyncClient",
    "AsyncRemoteBranch",
    "AsyncRemoteSession",
    "Client",
    "CustomParams",
    "RemoteBranch",
    "RemoteSession",
    "ServedLora",
    "ServedTrie",
    "ServerError",
]
