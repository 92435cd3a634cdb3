"""A decoder of a user's own file is found by its parameters' type and by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from typing import Any

import pytest

from pagedec import speculation
from pagedec.core.draft import Draft
from pagedec.core.history import History
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch
from pagedec.decoders import NGram, Sampling, decoder, decoder_for, make_decoder, registry
from pagedec.errors import InvalidArgument, NotFound
from pagedec.fields import Integer, option
from pagedec.params import RequestParams, SamplingParams
from pagedec.speculation import JacobiSpeculation, NGramSpeculation, Speculation


@pytest.fixture(autouse=True)
def _same_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_by_params", dict(registry._by_params))
    monkeypatch.setattr(speculation, "METHODS", dict(speculation.METHODS))
    yield


@dataclass(frozen=True, slots=True)
class OwnParams(SamplingParams):
    bonus: int = 3


class Own(Sampling):
    """Somebody's decoder."""


CONTEXT = DecoderContext(History(16), 1, 10, 100)


def test_found_by_type_and_by_name() -> None:
    decoder("own", params=OwnParams)(Own)
    assert type(make_decoder(OwnParams(bonus=4), CONTEXT)) is Own
    assert type(make_decoder(SamplingParams(), CONTEXT)) is Sampling
    assert decoder_for("own").make is Own and decoder_for(OwnParams).name == "own"


def test_a_subclass_of_known_parameters_uses_their_decoder() -> None:
    assert type(make_decoder(OwnParams(), CONTEXT)) is Sampling


def test_unknown_parameters_name_the_known_ones() -> None:
    with pytest.raises(NotFound, match=r"sampling \(SamplingParams\)"):
        make_decoder({"temperature": 1}, CONTEXT)
    with pytest.raises(NotFound, match="decoder 'beams' does not exist"):
        decoder_for("beams")


def test_taken_names_and_types_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="sampling"):
        decoder("sampling", params=OwnParams)(Own)
    with pytest.raises(InvalidArgument, match="params"):
        decoder("own", params=SamplingParams)(Own)
    assert decoder_for("sampling").make is Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedParams(RequestParams):
    """Its constructor takes what is no field."""

    width: int = option(4, Integer("samples", low=1))
    note: InitVar[str] = ""

    def __post_init__(self, note: str) -> None:
        RequestParams.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TripleParams(RequestParams):
    """As documented: nothing is done to refuse what it does not have."""

    width: int = option(4, Integer("samples", low=1))


def test_fields_that_parameters_of_one_s_own_do_not_have_are_told_with_those_that_they_have() -> None:
    for _ in range(2):  # as a module that is loaded again
        decoder("triple", params=TripleParams)(Own)
    with pytest.raises(InvalidArgument, match="^foo is 0: not a field of TripleParams; known are width, max_tokens, "):
        TripleParams(foo=0)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="^widht is 3: .*; did you mean width[?]$"):
        TripleParams(widht=3)  # type: ignore[call-arg]
    assert TripleParams(width=2, max_tokens=5).clone(width=3) == TripleParams(width=3, max_tokens=5)
    assert not hasattr(TripleParams.__init__.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]
    decoder("noted", params=NotedParams)(Own)
    assert NotedParams(note="mine").width == 4


def test_a_reloaded_module_replaces_its_decoder() -> None:
    decoder("own", params=OwnParams)(Own)
    again: Any = type("Own", (Sampling,), {"__module__": Own.__module__, "__qualname__": Own.__qualname__})
    decoder("own", params=OwnParams)(again)
    assert decoder_for("own").make is again


NGRAM = {"method": "ngram"}


def test_the_way_to_draft_chooses_among_decoders_of_the_same_parameters() -> None:
    assert type(make_decoder(SamplingParams(speculative=NGRAM), CONTEXT)) is NGram
    assert type(make_decoder(SamplingParams(speculative=False), CONTEXT)) is Sampling
    assert type(make_decoder(OwnParams(speculative=NGRAM), CONTEXT)) is NGram, "who adds nothing has what there is"
    assert decoder_for(SamplingParams, NGramSpeculation).name == "ngram"
    with pytest.raises(InvalidArgument, match="must be new; it belongs to the decoder 'ngram'"):
        decoder("other", params=SamplingParams, speculation=NGramSpeculation)(Own)


def test_a_decoder_of_one_s_own_does_not_draft_behind_one_s_back() -> None:
    decoder("own", params=OwnParams)(Own)
    assert decoder_for(OwnParams, NGramSpeculation).make is Own
    with pytest.raises(InvalidArgument, match="^speculative is .*: must be None or False: the decoder own does not"):
        make_decoder(OwnParams(speculative=NGRAM), CONTEXT)
    decoder("own-jacobi", params=OwnParams, speculation=JacobiSpeculation)(Own)
    assert decoder_for(OwnParams, JacobiSpeculation).name == "own-jacobi"


# ---------------------------------------------------------------------------------------------------- ways of one's own
@dataclass(frozen=True, slots=True, kw_only=True)
class EchoSpeculation(Speculation):
    """The last token again."""

    method = "echo"
    count: int = option(3, Integer("tokens", low=1, high=9))


class Echo(Sampling):
    """Drafts that the last token is repeated."""

    def __init__(self, params: SamplingParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        assert isinstance(params.speculation, EchoSpeculation)
        self.count = params.speculation.count

    def draft(self, branch: Branch, room: int) -> Draft:
        count = min(self.count, self.context.left(branch), room)
        return Draft.chain([self.context.history.token[branch.tip]] * max(0, count))


def test_a_way_to_draft_of_one_s_own_is_one_file() -> None:
    """Tables name it, with numbers of its own, and it drafts as widely as pays."""
    with pytest.raises(InvalidArgument, match="must be one of ngram"):
        SamplingParams(speculative={"method": "echo"})
    decoder("echo", params=SamplingParams, speculation=EchoSpeculation)(Echo)
    history = History(16)
    made = make_decoder(SamplingParams(speculative={"method": "echo", "count": 2}), DecoderContext(history, 2, 10, 100))
    assert type(made) is Echo and made.resting_sampler is made.sampler
    assert made.draft(Branch(history.append(0, [5, 7]), {}, (0,), 0, 2), 9) == Draft.chain([7, 7])
    fixed = make_decoder(SamplingParams(speculative={"method": "echo", "adaptive": False}), CONTEXT)
    assert fixed.resting_sampler is None
    with pytest.raises(InvalidArgument, match=r"speculative\.count is 10: must be"):
        SamplingParams(speculative={"method": "echo", "count": 10})


@pytest.mark.parametrize("name", ["ngram", "eagle", None])
def test_a_way_to_draft_needs_a_name_of_its_own(name: str | None) -> None:
    kind = type("Taken", (Speculation,), {"method": name, "__module__": __name__})
    with pytest.raises(InvalidArgument, match=r"speculation\.method .*must be"):
        decoder("taken", params=SamplingParams, speculation=kind)(Echo)
    with pytest.raises(NotFound):
        decoder_for("taken")


@pytest.mark.parametrize("said", [[5, 7], None])
def test_a_draft_that_is_none_is_told_as_one(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "draft", lambda *_: said)
    decoder("echo", params=SamplingParams, speculation=EchoSpeculation)(Echo)
    history = History(16)
    made = make_decoder(SamplingParams(speculative={"method": "echo"}), DecoderContext(history, 2, 10, 100))
    with pytest.raises(
        InvalidArgument, match=r"draft is .*: must be a Draft, such as Draft\.chain\(tokens\), or a Roll"
    ):
        made.propose([Branch(history.append(0, [5, 7]), {}, (0,), 0, 2)], 9)
