"""The torch engine against transformers, against itself in other batches, and against bad input."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from engine_models import (
    VOCABULARY,
    generate,
    make_engine,
    make_model,
    make_requests,
    reference,
    rows_of,
    score,
    seed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from intellect_protocol import sampling as seeded
from intellect_protocol import toploc
from intellect_protocol.engines import scoring
from intellect_protocol.engines.base import GenerateRequest, Sampling, ScoreRow
from intellect_protocol.engines.hf_model import TransformersDecoder
from intellect_protocol.engines.linear import Linear
from intellect_protocol.engines.model import NativeDecoder
from intellect_protocol.engines.torch_engine import TorchEngine, choose_device, choose_dtype
from intellect_protocol.errors import ConfigError, NumericError, PreflightError, UsageError

NATIVE = ("qwen2", "qwen3", "llama")
KINDS = (*NATIVE, "gpt2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def engines(models: dict[str, Path]) -> dict[str, TorchEngine]:
    return {kind: make_engine(models[kind]) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_probe_gives_the_log_probs_of_transformers(
    kind: str, models: dict[str, Path], engines: dict[str, TorchEngine]
) -> None:
    prompt = [(5 * i) % VOCABULARY for i in range(150)]
    logits = reference(models[kind])(torch.tensor([prompt])).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(engines[kind].probe(prompt)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_known_architectures_run_natively_and_others_through_transformers(
    kind: str, engines: dict[str, TorchEngine]
) -> None:
    decoder = engines[kind]._decoder
    assert isinstance(decoder, NativeDecoder if kind in NATIVE else TransformersDecoder)


@pytest.mark.parametrize("kind", KINDS)
def test_completions_are_what_the_seeded_sampler_draws_from_transformers(
    kind: str, models: dict[str, Path], engines: dict[str, TorchEngine]
) -> None:
    model, temperature = reference(models[kind]), 0.8
    request = GenerateRequest([3, 1, 4, 1, 5], [seed(1), seed(2)], 24)
    completions = generate(engines[kind], [request], Sampling(temperature=temperature))[0]
    for sigma, completion in zip(request.seeds, completions, strict=True):
        tokens = list(request.prompt)
        with torch.no_grad():
            for t in range(24):
                logits = model(torch.tensor([tokens])).logits[:, -1].float()
                uniform = torch.tensor([seeded.uniform(sigma, t)], dtype=torch.float64)
                drawn = seeded.sample(logits, uniform, temperature)
                tokens.append(int(drawn.tokens[0]))
                assert completion.logprobs[t] == pytest.approx(float(drawn.log_probs[0]), abs=1e-4)
        assert completion.tokens == tokens[len(request.prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_commitments_cover_the_states_that_produced_the_tokens(
    kind: str, models: dict[str, Path], engines: dict[str, TorchEngine]
) -> None:
    request = make_requests(prompts=1, samples=1, max_tokens=70)[0]
    # Hot, so that neighbouring tokens and their states differ.
    completion = generate(engines[kind], [request], Sampling(temperature=5.0))[0][0]
    with torch.no_grad():
        out = reference(models[kind]).base_model(torch.tensor([request.prompt + completion.tokens]))
    first = len(request.prompt) - 1
    states = out.last_hidden_state[0, first : first + len(completion.tokens)]
    for report in toploc.verify(states, completion.proofs):
        assert report.exponent_mismatches == 0
        assert report.mantissa_mean < 0.1
    moved = toploc.verify(states.roll(1, 0), completion.proofs)
    assert max(report.exponent_mismatches for report in moved) > 20


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
def test_a_completion_in_float32_does_not_depend_on_the_batch_around_it(
    kind: str, models: dict[str, Path], engines: dict[str, TorchEngine]
) -> None:
    requests = make_requests()
    together = generate(engines[kind], requests)

    @settings(max_examples=5, deadline=None)
    @given(
        max_rows=st.integers(1, 24),
        chosen=st.lists(
            st.tuples(st.integers(0, len(requests) - 1), st.integers(0, 3)),
            min_size=1,
            max_size=9,
            unique=True,
        ),
    )
    def check(max_rows: int, chosen: list[tuple[int, int]]) -> None:
        engine = make_engine(models[kind], max_rows=max_rows)
        alone = [msgspec.structs.replace(requests[r], seeds=[requests[r].seeds[s]]) for r, s in chosen]
        for (r, s), (completion,) in zip(chosen, generate(engine, alone), strict=True):
            assert completion.tokens == together[r][s].tokens
            assert completion.finish_reason == together[r][s].finish_reason
            assert completion.logprobs == pytest.approx(together[r][s].logprobs, abs=1e-5)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_agrees_with_decoding_in_float32(kind: str, engines: dict[str, TorchEngine]) -> None:
    requests, sampling = make_requests(max_tokens=70), Sampling(temperature=0.9, top_k=40, top_p=0.95)
    completions = generate(engines[kind], requests, sampling)
    flat = [completion for own in completions for completion in own]
    for completion, row in zip(
        flat, score(engines[kind], rows_of(requests, completions), sampling), strict=True
    ):
        assert all(row.exact)
        assert max(row.distances) == 0
        assert row.logprobs == pytest.approx(completion.logprobs, abs=1e-4)
        assert len(row.chunk_reports) == len(completion.proofs) == -(-len(completion.tokens) // 32)
        assert all(report.exponent_mismatches == 0 for report in row.chunk_reports)
        assert not row.proof_error


def test_prefill_agrees_with_decoding_in_bfloat16(models: dict[str, Path]) -> None:
    engine = make_engine(models["llama"], dtype="bfloat16")
    requests = make_requests(max_tokens=40)
    scores = score(engine, rows_of(requests, generate(engine, requests)))
    assert max(max(row.distances) for row in scores) < 0.05
    assert max(report.exponent_mismatches for row in scores for report in row.chunk_reports) <= 38
    assert max(report.mantissa_mean for row in scores for report in row.chunk_reports) <= 10


def test_scoring_sees_another_policy_another_seed_and_an_edited_token(
    tmp_path: Path, engines: dict[str, TorchEngine]
) -> None:
    requests = make_requests(prompts=2)
    rows = rows_of(requests, generate(engines["qwen2"], requests))
    other = score(make_engine(make_model(tmp_path / "other", seed=1)), rows)
    assert all(max(row.distances) > 0.05 for row in other)
    assert all(report.exponent_mismatches > 38 for row in other for report in row.chunk_reports)
    reseeded = score(engines["qwen2"], [msgspec.structs.replace(row, seed=seed(99)) for row in rows])
    assert all(max(row.distances) > 0.05 for row in reseeded)
    edited = [
        msgspec.structs.replace(row, completion=[*row.completion[:-1], (row.completion[-1] + 1) % VOCABULARY])
        for row in rows
    ]
    assert not any(row.exact[-1] for row in score(engines["qwen2"], edited))


def test_long_rows_take_the_path_without_a_mask_to_the_same_scores(
    engines: dict[str, TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests()
    rows = rows_of(requests, generate(engines["qwen3"], requests))
    shared = score(engines["qwen3"], rows)
    monkeypatch.setattr(scoring, "_MASK_BUDGET", 0)
    whole = score(engines["qwen3"], rows)
    for one, two in zip(shared, whole, strict=True):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


def test_a_row_ends_with_its_first_stop_token(engines: dict[str, TorchEngine]) -> None:
    requests = make_requests(samples=8)
    free = generate(engines["qwen2"], requests)
    stop = [free[0][0].tokens[5], free[1][0].tokens[9]]
    stopped = generate(engines["qwen2"], requests, Sampling(stop_ids=stop))
    reasons = set()
    for request, own, unstopped in zip(requests, stopped, free, strict=True):
        for completion, whole in zip(own, unstopped, strict=True):
            ends = [t for t, token in enumerate(whole.tokens) if token in stop]
            length = ends[0] + 1 if ends else request.max_tokens
            assert completion.tokens == whole.tokens[:length]
            assert completion.finish_reason == ("stop" if ends else "length")
            reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_bad_proofs_of_one_row_do_not_touch_the_others(engines: dict[str, TorchEngine]) -> None:
    requests = make_requests(prompts=1, samples=3)
    rows = rows_of(requests, generate(engines["qwen2"], requests))
    rows[1] = msgspec.structs.replace(rows[1], proofs=[b"\0" * 258, *rows[1].proofs[1:]])
    scores = score(engines["qwen2"], rows)
    assert "modulus" in scores[1].proof_error
    assert scores[1].chunk_reports == []
    assert len(scores[1].logprobs) == len(rows[1].completion)
    assert [row.proof_error for row in (scores[0], scores[2])] == ["", ""]


def test_update_swaps_the_policy_and_refuses_another_architecture(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    engine, prompt = make_engine(models["qwen2"]), [1, 2, 3, 4]
    before = engine.probe(prompt)
    newer = make_model(tmp_path / "newer", seed=7)
    engine.update(newer)
    after = engine.probe(prompt)
    assert after != pytest.approx(before, abs=0.01)
    assert after == make_engine(newer).probe(prompt)
    for folder in (models["llama"], models["gpt2"], tmp_path):
        with pytest.raises(ConfigError):
            engine.update(folder)
    assert engine.probe(prompt) == after


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_never_become_completions(
    value: float, tmp_path: Path, models: dict[str, Path]
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_bytes((models["qwen2"] / "config.json").read_bytes())
    tensors = load_file(models["qwen2"] / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, folder / "model.safetensors")
    engine = make_engine(folder)
    with pytest.raises(NumericError):
        generate(engine, make_requests())
    with pytest.raises(NumericError):
        score(engine, [ScoreRow([1, 2], [3, 4], seed(1), [b"\0" * 258])])
    with pytest.raises(NumericError):
        engine.probe([1, 2, 3])


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (GenerateRequest([1, VOCABULARY], [seed(1)], 4), "vocabulary"),
        (GenerateRequest([1, -1], [seed(1)], 4), "vocabulary"),
        (GenerateRequest([], [seed(1)], 4), "empty"),
        (GenerateRequest([1], [b"short"], 4), "32 bytes"),
        (GenerateRequest([1], [seed(1)], 0), "fit"),
        (GenerateRequest([1] * 500, [seed(1)], 13), "context"),
    ],
)
def test_requests_out_of_their_limits_are_refused(
    request_: GenerateRequest, text: str, engines: dict[str, TorchEngine]
) -> None:
    with pytest.raises(UsageError, match=text):
        generate(engines["qwen2"], [request_])


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(float("nan")), Sampling(1, -1), Sampling(1, 0, 0)]
)
def test_sampling_that_makes_no_sense_is_refused(sampling: Sampling, engines: dict[str, TorchEngine]) -> None:
    with pytest.raises(UsageError):
        generate(engines["qwen2"], make_requests(), sampling)


@pytest.mark.parametrize("tokens", [[VOCABULARY], [-1], []])
def test_rows_with_impossible_tokens_are_refused(tokens: list[int], engines: dict[str, TorchEngine]) -> None:
    with pytest.raises(UsageError):
        score(engines["qwen2"], [ScoreRow([1], tokens, seed(1), [])])


def _damage_missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _damage_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 63)


def _damage_extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)


def _damage_type(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int32)


@pytest.mark.parametrize("damage", [_damage_missing, _damage_shape, _damage_extra, _damage_type])
def test_checkpoints_with_wrong_tensors_are_refused(
    damage: object, tmp_path: Path, models: dict[str, Path]
) -> None:
    assert callable(damage)
    (tmp_path / "config.json").write_bytes((models["qwen2"] / "config.json").read_bytes())
    tensors = load_file(models["qwen2"] / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="tensor"):
        make_engine(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"model_type": "qwen2"}', b"\xff", b"[" * 100_000])
def test_configurations_that_are_none_are_refused(
    content: bytes, tmp_path: Path, models: dict[str, Path]
) -> None:
    (tmp_path / "model.safetensors").write_bytes((models["qwen2"] / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        make_engine(tmp_path)


def test_only_safetensors_are_read(tmp_path: Path, models: dict[str, Path]) -> None:
    (tmp_path / "config.json").write_bytes((models["qwen2"] / "config.json").read_bytes())
    torch.save(load_file(models["qwen2"] / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        make_engine(tmp_path)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 39), st.sampled_from([(64, 192), (576, 96), (1536, 64)]))
def test_packed_products_of_a_row_do_not_depend_on_the_rows_beside_it(
    rows: int, place: int, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(torch.randn(shape[1], shape[0], generator=generator))
    if not linear.packed:
        pytest.skip("this build of torch has no packed products")
    x = torch.randn(40, shape[0], generator=generator)
    chosen = torch.arange(40).roll(-place)[:rows]
    assert torch.equal(linear(x[chosen]), linear(x)[chosen])


def test_cuda_is_refused_where_there_is_none_and_words_must_have_a_meaning() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(PreflightError, match="--device cpu"):
            choose_device("cuda")
        assert choose_device("auto") == torch.device("cpu")
    for word in ("gpu", "cpu:0", "cuda:x", ""):
        with pytest.raises(ConfigError):
            choose_device(word)
    with pytest.raises(ConfigError):
        TorchEngine(device="cpu", dtype="int8")


def test_automatic_dtype_keeps_small_models_in_float32() -> None:
    assert choose_dtype("auto", torch.device("cpu"), 100_000) == torch.float32
    assert choose_dtype("bfloat16", torch.device("cpu"), 100_000) == torch.bfloat16
