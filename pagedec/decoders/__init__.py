"""Decoding algorithms: one file each. They know the protocol and the history, never a block or a tensor."""

from pagedec.decoders.beam import Beam
from pagedec.decoders.beam_guesses import LookaheadBeam, NGramBeam
from pagedec.decoders.beam_rolls import DraftModelBeam
from pagedec.decoders.draft_model import DraftModel
from pagedec.decoders.eagle3 import Eagle3, Eagle3Beam
from pagedec.decoders.jacobi import Jacobi
from pagedec.decoders.lookahead import Lookahead
from pagedec.decoders.ngram import NGram
from pagedec.decoders.registry import decoder, decoder_for, make_decoder
from pagedec.decoders.sampling import Sampling
from pagedec.decoders.scoring import GivenText
from pagedec.decoders.suffix import Suffix

__all__ = [
    "Beam",
    "DraftModel",
    "DraftModelBeam",
    "Eagle3",
    "Eagle3Beam",
    "GivenText",
    "Jacobi",
    "Lookahead",
    "LookaheadBeam",
    "NGram",
    "NGramBeam",
    "Sampling",
    "Suffix",
    "decoder",
    "decoder_for",
    "make_decoder",
]
