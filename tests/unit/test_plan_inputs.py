"""What may be given, how it is laid over each other, and one clear line for what may not."""

from __future__ import annotations

import pytest
import yaml

from forebay.errors import UsageError
from forebay.plan import presets
from forebay.plan.arithmetic import work
from forebay.plan.content import content_bytes, count_params
from forebay.plan.document import inputs_of
from forebay.plan.inputs import FIELDS, Inputs
from forebay.plan.resolve import read_file, read_flags, resolve


def of(**flags: str) -> Inputs:
    return resolve(flags=read_flags({key.replace("__", "."): text for key, text in flags.items()}))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {"cluster.d2h": "55"},
            r"^--d2h: rate: expected bytes per second such as 55GB/s, found '55'$",
        ),
        ({"cluster.d2h": "55 furlongs/s"}, r"^--d2h: size: unknown unit 'furlongs'"),
        ({"cluster.d2h": "400Gb/s"}, r"may mean bits or bytes: write Gbit/s or GB/s$"),
        ({"checkpoint.cadence": "-30min"}, r"^--cadence: expected more than 0, found -30min$"),
        ({"checkpoint.cadence": "0"}, r"^--cadence: expected more than 0, found 0$"),
        ({"checkpoint.cadence": "half an hour"}, r"^--cadence: duration: expected"),
        ({"model.params": "0"}, r"^--params: expected more than 0"),
        ({"model.params": "lots"}, r"^--params: count: expected a number"),
        (
            {"cluster.gpus": "100"},
            r"^gpus: expected a multiple of gpus-per-node 8, found 100: 96 or 104$",
        ),
        ({"cluster.gpus": "16.5"}, r"^--gpus: expected a whole number"),
        ({"layout.tp": "7"}, r"^layout: expected TP 7 x PP 16 x CP 1 = 112 to divide gpus 16384$"),
        ({"layout.dp": "64"}, r"TP 8 x PP 16 x CP 1 x DP 64 = 8192 to equal gpus 16384$"),
        ({"layout.ep": "3"}, r"^layout: expected EP 3 to divide the 1024 GPUs"),
        ({"layout.writers": "some"}, r"^--writers: expected every or replica, found 'some'$"),
        ({"layout.skew": "0.5"}, r"^skew: expected 1 or more, found 0.5$"),
        (
            {"checkpoint.durable_cadence": "1min"},
            r"^durable-cadence: expected the cadence 1800 s or more",
        ),
        ({"checkpoint.quantile": "100%"}, r"^quantile: expected between 0 and 1"),
        (
            {"checkpoint.spread": "3"},
            r"^--spread: fraction: expected 0 to 1, or 0% to 100%, found '3'$",
        ),
        ({"checkpoint.local": "maybe"}, r"^--local: expected yes or no, found 'maybe'$"),
        (
            {"failures.mtbf": "3h", "failures.node_failures": "0.004"},
            r"expected mtbf or node-failures",
        ),
        (
            {"failures.share_memory": "60%", "failures.share_peer": "60%"},
            r"sum to 100 %, found 120 %$",
        ),
        ({"model.content": "weights=bf17"}, r"^content: unknown dtype 'bf17'"),
        ({"model.content": "wieghts=bf16"}, r"^content: unknown part 'wieghts'"),
        ({"model.content": "weights=bf16,weights=fp32"}, r"^content: 'weights' stands twice"),
        ({"model.content": "16 bytes"}, r"^content: expected parts such as"),
        ({"model.content": "14", "model.bytes_per_param": "12"}, r"is not 12 bytes a parameter$"),
        ({"model.bytes_per_param": "16B"}, r"^--bytes-per-param: expected a bare number"),
        ({"failures.mtbf": "1ms"}, r"^mtbf: expected 1 s to 1e12 s for the job"),
        ({"checkpoint.pause": "1e100"}, r"beyond what can be worked with$"),
    ],
)
def test_one_line_for_what_cannot_be(flags: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError, match=line) as caught:
        resolve(flags=read_flags(flags))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("clusters: {gpus: 8}", r"^f.yaml: unknown section 'clusters': did you mean cluster\?$"),
        ("cluster: {gpu: 8}", r"^f.yaml: cluster.gpu: unknown field: did you mean gpus\?$"),
        ("cluster: [8]", r"^f.yaml: cluster: expected fields and values"),
        (
            "cluster: {d2h: {valeu: 3}}",
            r"^f.yaml: cluster.d2h: expected a value, or value and source",
        ),
        ("cluster: {d2h: [1, 2]}", r"^f.yaml: cluster.d2h: expected a rate such as 55GB/s"),
        ("preset:", r"^f.yaml: preset: expected the name of a preset, found None$"),
        ("storage: {preset: 3}", r"^f.yaml: storage.preset: expected the name of a preset"),
        ("just words", r"^f.yaml: expected fields and values"),
        (
            "checkpoint: {cadence: 1:30}",
            r"^f.yaml: checkpoint.cadence: expected a time .* its unit",
        ),
        ("storage: {filesystem: 100}", r"^f.yaml: storage.filesystem: expected a rate .* its unit"),
    ],
)
def test_one_line_for_a_file(text: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        read_file(yaml.safe_load(text), "f.yaml")


def test_what_is_particular_goes_before_what_is_general() -> None:
    for order in ("restart: 1min, restart_memory: 10s", "restart_memory: 10s, restart: 1min"):
        _, figures = read_file(yaml.safe_load(f"failures: {{{order}}}"), "f.yaml")
        failures = resolve(file=figures).failures
        assert (failures.restart_memory_s, failures.restart_peer_s) == (10, 60)


def test_unknown_presets_are_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"^model: unknown preset 'gpt', expected llama3-8b, "):
        resolve(model="gpt")


def test_flags_go_before_a_file_and_a_file_before_presets() -> None:
    document = yaml.safe_load(
        """
        preset: 70b
        cluster: {preset: gb200-nvl72, nvme: {value: 12 GB/s, source: the rack's data sheet}}
        checkpoint: {cadence: 10min}
        failures: {restart: 2min}
        """
    )
    chosen, figures = read_file(document, "f.yaml")
    assert chosen == {"model": "70b", "cluster": "gb200-nvl72"}
    inputs = resolve(**chosen, file=figures, flags=read_flags({"checkpoint.cadence": "5min"}))
    assert inputs.checkpoint.cadence_s == 300
    assert inputs.cluster.nvme_bytes_per_s == 12e9
    assert inputs.cluster.gpus_per_node == 4
    assert inputs.failures.restart_durable_s == inputs.failures.restart_memory_s == 120
    shown = inputs_of(inputs)
    assert shown["cluster.nvme"]["source"] == "the rack's data sheet"
    assert shown["checkpoint.cadence"]["source"] == "given: --cadence"
    assert shown["failures.restart_peer"]["source"] == "given in f.yaml"


def test_every_figure_has_a_source() -> None:
    for model in presets.MODELS:
        for cluster in presets.CLUSTERS:
            for storage in presets.STORE_NAMES:
                inputs = resolve(model=model, cluster=cluster, storage=storage)
                bare = [name for name, each in inputs_of(inputs).items() if not each["source"]]
                assert not bare
                assert work(inputs, best=False).goodput > 0
    assert {name for name in FIELDS if not FIELDS[name][1].help.endswith(".")} == set()


def test_parameters_follow_from_a_shape_that_was_given_later() -> None:
    assert of(model__layers="126").model.params == pytest.approx(405.85e9, rel=1e-4)
    both = of(model__layers="126", model__params="1e9").model
    assert both.params == 1e9
    assert of(model__params="7e9").model.layers is None


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        ((32, 4096, 14336, 32, 8), 8.03e9),
        ((80, 8192, 28672, 64, 8), 70.55e9),
        ((126, 16384, 53248, 128, 8), 405.85e9),
    ],
)
def test_parameters_of_llama3(shape: tuple[int, int, int, int, int], published: float) -> None:
    layers, hidden, ffn, heads, kv_heads = shape
    count = count_params(
        layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, vocab=128_256
    )
    assert count == pytest.approx(published, rel=1e-4)


def test_parameters_of_mixtral_8x7b() -> None:
    count = count_params(
        layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32000, experts=8
    )
    assert count == pytest.approx(46.7e9, rel=1e-3)


def test_content() -> None:
    assert content_bytes("weights=bf16, master=fp32, moments=2*fp32, gradients=fp32") == 18
    assert content_bytes("weights=fp8,moments=2*bf16") == 5
    assert [content_bytes(name) for name in ("16", "14", "12")] == [16, 14, 12]


def test_a_job_smaller_than_its_presets_layout_is_fsdp() -> None:
    inputs = of(cluster__gpus="8")
    assert (inputs.layout.tp, inputs.layout.pp, inputs.layout.dp) == (1, 1, 8)
    assert "FSDP" in inputs.sources["layout.tp"]
    assert of(cluster__gpus="4").cluster.gpus_per_node == 4


def test_shares_that_are_left_share_the_rest() -> None:
    failures = of(failures__share_memory="75%").failures
    assert failures.share_local + failures.share_peer + failures.share_durable == pytest.approx(
        0.25
    )
    assert failures.share_peer / failures.share_local == pytest.approx(67 / 8)


def test_mtbf_and_the_rate_of_a_node_are_one() -> None:
    assert of(failures__node_failures="0.0065").failures.mtbf_s == pytest.approx(
        86400 / 2048 / 0.0065
    )
    assert of(failures__mtbf="1h").failures.per_node_day == pytest.approx(24 / 2048)


def test_a_superpod_grows_with_its_nodes() -> None:
    whole = resolve(storage="superpod-good").storage.filesystem_bytes_per_s
    small = resolve(
        model="8b", storage="superpod-good", flags=read_flags({"cluster.gpus": "256"})
    ).storage.filesystem_bytes_per_s
    assert (whole, small) == (448e9, 7e9)
