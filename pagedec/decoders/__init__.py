"""Decoding algorithms: one file each. They know the protocol and the history, never a block or a tensor."""

from pagedec.decoders.beam import Beam
from pagedec.decoders.registry import decoder, decoder_for, make_decoder
from pagedec.decoders.sampling import Sampling

__all__ = ["Beam", "Sampling", "decoder", "decoder_for", "make_decoder"]
