"""Decoders that an operator registers: `pagedec serve --decoder`, and `CustomParams` of the client."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagedec import LLM, InvalidArgument, RequestOutputKind
from pagedec.client import AsyncClient, CustomParams
from pagedec.core.protocol import Decoder
from pagedec.decoders.registry import decoder, decoder_for
from pagedec.errors import NotFound
from pagedec.fields import Integer, option
from pagedec.params import RequestParams
from pagedec.serve.own_decoders import load_decoders
from tests.serve.serving import Serving, client_of, plain

Serve = Callable[..., Serving]
PROMPT = [5 + i * 7 % 120 for i in range(40)]
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of the design's page, as somebody's own."""
    [source] = [
        block for block in re.findall(r"```python\n(.*?)```", DESIGN.read_text("utf-8"), re.S) if "@decoder" in block
    ]
    path = tmp_path_factory.mktemp("own") / "served_race.py"
    path.write_text(source.replace('@decoder("race"', '@decoder("served race"').replace("Race", "ServedRace"))
    return str(path)


def test_a_decoder_by_its_name(serve: Serve, llm: LLM, race: str) -> None:
    serving = serve(decoder=(race,))
    made = decoder_for("served race").params
    [want] = llm.generate([PROMPT], made(width=3, stride=4, max_tokens=16, seed=5, logprobs=1), use_tqdm=False)
    params = CustomParams(
        decoder="served race", parameters={"width": 3, "stride": 4}, max_tokens=16, seed=5, logprobs=1
    )
    with pytest.raises(InvalidArgument, match="^widht is 3: not a field of ServedRaceParams; known are width, .*width"):
        made(widht=3)
    with client_of(serving) as client:
        assert "served race" in client.models()[0].decoders
        [alone] = client.generate(PROMPT, params)
        together = client.generate([PROMPT] * 2, params, use_tqdm=False)
        *_, last = client.stream(PROMPT, params)
        assert [plain(output) for output in (alone, *together, last)] == [plain(want)] * 4
        deltas = list(client.stream(PROMPT, params.clone(output_kind=RequestOutputKind.DELTA)))
        assert [t for output in deltas for a in output.outputs for t in a.token_ids] == want.outputs[0].token_ids
        with client.session(PROMPT) as far, llm.session(PROMPT) as own:
            assert plain(far.generate(params)) == plain(
                own.generate(made(width=3, stride=4, max_tokens=16, seed=5, logprobs=1))
            )
            assert far.token_ids == own.token_ids
        with pytest.raises(NotFound, match='^decoder "nobody\'s" does not exist; known are beam, sampling, '):
            client.generate(PROMPT, CustomParams(decoder="nobody's", max_tokens=2))  # cut where other tests have many
        with pytest.raises(InvalidArgument, match="^parameters.widht is 3: not a field of .*; known are "):
            client.generate(PROMPT, CustomParams(decoder="served race", parameters={"widht": 3}, max_tokens=2))
        with pytest.raises(InvalidArgument, match="^parameters is .*: must be what JSON can say"):
            client.generate(PROMPT, CustomParams(decoder="served race", parameters={"width": {1}}, max_tokens=2))

    async def run() -> None:
        async with AsyncClient(f"127.0.0.1:{serving.server.port}") as client:
            *_, last = [output async for output in client.generate(PROMPT, params)]
            assert plain(last) == plain(want)

    serving.loop.run(run())


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsParams(RequestParams):
    """Two answers a pair: no parameter says how many there are."""

    pairs: int = option(1, Integer("pairs of answers", low=1))

    @property
    def num_answers(self) -> int:
        return 2 * self.pairs


@decoder("served pairs", params=PairsParams)
class Pairs(Decoder):
    """It is never let in."""


def test_too_many_answers_of_a_decoder_that_computes_their_number(serve: Serve) -> None:
    """No error names a parameter that there is not."""
    serving = serve(max_answers=8, max_client_branches=4, max_client_tokens=len(PROMPT) + 5)

    def asked(pairs: int) -> CustomParams:
        return CustomParams(decoder="served pairs", parameters={"pairs": pairs}, answers=2 * pairs, max_tokens=1)

    with client_of(serving) as client, client.session(PROMPT) as session:
        for ask, said in (
            (lambda: client.generate(PROMPT, asked(5)), "10 answers: must be at most 8, the server's max_answers$"),
            (lambda: client.generate(PROMPT, asked(3)), "6 answers: must be at most 5: a client's requests, prompts "),
            (lambda: session.generate(asked(2), keep="all"), "4 answers: must be at most 3: a client's sessions may "),
        ):
            with pytest.raises(InvalidArgument, match=f"^parameters is {said}"):
                ask()  # type: ignore[no-untyped-call]


def test_what_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import nobody_s_module\n")
    for place, why in (
        (str(tmp_path / "none.py"), "cannot be imported: FileNotFoundError: there is no such file"),
        (str(tmp_path / "wrong.py"), "cannot be imported: ModuleNotFoundError: No module named 'nobody_s_module'"),
        ("nobody_s_module", "cannot be imported: ModuleNotFoundError: No module named 'nobody_s_module'"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            load_decoders([place])
        assert caught.value.field == "decoder" and caught.value.limit == why


def test_a_file_that_registers_nothing(race: str, tmp_path: Path) -> None:
    """A forgotten decorator is told of at the start, not by the first request. What another file has registered may be
    imported from it."""
    source = Path(race).read_text("utf-8").replace("ServedRace", "OtherRace").replace("served race", "other race")
    (tmp_path / "other_race.py").write_text(source)
    (tmp_path / "same_race.py").write_text("from other_race import OtherRace\n")
    (tmp_path / "whole_race.py").write_text("import other_race\n")
    load_decoders([str(tmp_path / f"{name}.py") for name in ("other_race", "same_race", "whole_race", "other_race")])
    load_decoders(["other_race"])
    forgotten = source.replace('@decoder("other race", params=OtherRaceParams)', "")
    (tmp_path / "bare_race.py").write_text(f"from pagedec.decoders import Sampling\n{forgotten}")
    for place in (str(tmp_path / "bare_race.py"), "bare_race"):
        with pytest.raises(InvalidArgument) as caught:
            load_decoders([place])
        assert str(caught.value) == f"decoder is {place!r}: must register a decoder; it registers none"


@pytest.mark.parametrize("name", ["random", "numpy", "sys"])
def test_a_file_with_the_name_of_another_module(tmp_path: Path, name: str) -> None:
    """Whoever imports that later would have got the file."""
    before = sys.modules[name]
    (tmp_path / f"{name}.py").write_text("")
    with pytest.raises(InvalidArgument, match=f"must have a name of its own: the module {name} is ") as caught:
        load_decoders([str(tmp_path / f"{name}.py")])
    assert caught.value.field == "decoder" and sys.modules[name] is before
