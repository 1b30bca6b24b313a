"""Presets, a file and flags, laid over each other and checked together."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.errors import UsageError
from forebay.plan import presets
from forebay.plan.content import CONTENTS, content_bytes, count_params
from forebay.plan.figure import Figure, Given, Kind, Value, brief
from forebay.plan.inputs import FIELDS, SECTIONS, SHAPE, TIERS, Inputs

DAY_S = 86400.0
_SHORTEST_MTBF_S, _LONGEST_MTBF_S = 1.0, 1e12

_NEEDED = ("layers", "hidden", "ffn", "heads", "vocab")
_SHARES = tuple(f"failures.share_{tier}" for tier in TIERS)
_PRESET = "preset"
FOLLOWS_CADENCE = "the cadence"
"""The source of a cadence that was not given."""
RESTART = Given(
    key="restart", kind=Kind.SECONDS, help="Restart from any tier: detect, replace, load."
)
"""Sets the four restarts at once."""


@dataclass(frozen=True, slots=True)
class _Found:
    value: Value
    source: str
    layer: int


def read_file(document: object, name: str) -> tuple[dict[str, str], dict[str, Figure]]:
    """A file's ``(presets by kind, figures by section.key)``. Raises UsageError naming the field.

    ``document`` is what its YAML holds: a mapping of sections, each of fields; a field is a value
    or ``{value: ..., source: ...}``; ``preset`` stands at the top (the model) or in a section.
    """
    chosen: dict[str, str] = {}
    figures: dict[str, Figure] = {}
    for section, content in _mapping(document, name).items():
        if section == _PRESET:
            chosen["model"] = _preset(content, f"{name}: {_PRESET}")
            continue
        if section not in SECTIONS:
            raise UsageError(f"{name}: unknown section {section!r}{_near(section, SECTIONS)}")
        fields = _mapping(content, f"{name}: {section}")
        for key in sorted(fields, key=lambda each: each != RESTART.key):  # what is general first
            raw = fields[key]
            where = f"{name}: {section}.{key}"
            if key == _PRESET and section in ("model", "cluster", "storage"):
                chosen[section] = _preset(raw, where)
                continue
            source, value = f"given in {name}", raw
            if isinstance(raw, Mapping):
                if set(raw) - {"value", "source"} or "value" not in raw:
                    raise UsageError(
                        f"{where}: expected a value, or value and source, found {brief(raw)}"
                    )
                value, source = raw["value"], brief(raw.get("source", source))
            for full, given in _targets(section, key, where):
                figures[full] = Figure(value=given.read(value, where), source=source)
    return chosen, figures


def _preset(raw: object, where: str) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise UsageError(f"{where}: expected the name of a preset, found {brief(raw, repr)}")
    return raw


def read_flags(flags: Mapping[str, str]) -> dict[str, Figure]:
    """Flags by ``section.key`` (``failures.restart`` sets all four). Raises UsageError."""
    figures: dict[str, Figure] = {}
    for name, text in flags.items():
        section, _, key = name.partition(".")
        flag = "--" + key.replace("_", "-")
        for full, given in _targets(section, key, flag):
            figures[full] = Figure(value=given.read(text, flag), source=f"given: {flag}")
    return figures


def resolve(
    *,
    model: str | None = None,
    cluster: str | None = None,
    storage: str | None = None,
    file: Mapping[str, Figure] | None = None,
    flags: Mapping[str, Figure] | None = None,
) -> Inputs:
    """Inputs from presets by name, then what a file says, then what flags say.

    Raises UsageError: what cannot be together, in one line.
    """
    found: dict[str, _Found] = {}

    def lay(layer: int, figures: Mapping[str, Figure]) -> None:
        for name, figure in figures.items():
            found[name] = _Found(figure.value, figure.source, layer)

    over = {**(file or {}), **(flags or {})}
    bare = model is None and "model.params" in over
    model_name = presets.find("model", model, presets.DEFAULT_MODEL, presets.MODELS)
    cluster_name = presets.find("cluster", cluster, presets.DEFAULT_CLUSTER, presets.CLUSTERS)
    store_name = presets.find("storage", storage, presets.DEFAULT_STORE, presets.STORE_NAMES)
    lay(0, presets.DEFAULTS)
    lay(1, presets.MODELS[model_name])
    lay(1, presets.CLUSTERS[cluster_name])
    lay(2, file or {})
    lay(3, flags or {})
    _settle_model(found)
    nodes = _settle_layout(found)
    for name, figure in presets.store(store_name, _whole(found, "cluster.gpus")).items():
        if name not in found or found[name].layer == 0:
            found[name] = _Found(figure.value, figure.source, 1)
    _settle_times(found)
    _settle_failures(found, nodes)
    title = f"{model_name if not bare else 'this model'} on {nodes:,} nodes of {cluster_name}"
    return _inputs(title, found)


def _inputs(title: str, found: Mapping[str, _Found]) -> Inputs:
    parts: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        values: dict[str, Value | None] = {}
        for name, (attribute, _) in FIELDS.items():
            if name.startswith(f"{section}."):
                values[attribute] = found[name].value if name in found else None
        parts[section] = kind(**values)
    return Inputs(title=title, sources={name: each.source for name, each in found.items()}, **parts)


def _settle_model(found: dict[str, _Found]) -> None:
    """Parameters from the shape, and bytes from the content, where those were given last."""
    shape = {key: found[f"model.{key}"] for key in SHAPE if f"model.{key}" in found}
    params = found.get("model.params")
    newest = max((each.layer for each in shape.values()), default=-1)
    if params is None or newest > params.layer:
        missing = [key for key in _NEEDED if key not in shape]
        if missing:
            raise UsageError(
                f"model: expected params, or the shape; {', '.join(missing)} not given"
            )
        values = {key: each.value for key, each in shape.items()}
        values.setdefault("kv_heads", values["heads"])
        typed: dict[str, Any] = dict(values)
        found["model.params"] = _Found(count_params(**typed), "from the model's shape", newest)
    elif params.layer > newest:
        for key in shape:  # of another model: it would only mislead
            del found[f"model.{key}"]
    content, each = found["model.content"], found["model.bytes_per_param"]
    if content.layer == each.layer > 1 and content_bytes(str(content.value)) != each.value:
        raise UsageError(f"model: content {content.value} is not {each.value:g} bytes a parameter")
    if content.layer > each.layer:
        nbytes = content_bytes(str(content.value))
        found["model.bytes_per_param"] = _Found(nbytes, f"content: {content.value}", content.layer)
    elif each.layer > content.layer:
        usual = CONTENTS.get(f"{each.value:g}" if not isinstance(each.value, str) else "")
        found["model.content"] = _Found(usual or "not said", each.source, each.layer)


def _settle_layout(found: dict[str, _Found]) -> int:
    """Data parallel from the rest, all of it against the GPUs; returns the number of nodes."""
    gpus, per_node = _whole(found, "cluster.gpus"), _whole(found, "cluster.gpus_per_node")
    if gpus % per_node:
        if gpus < per_node and found["cluster.gpus_per_node"].layer <= 1:
            per_node = gpus  # a job on a part of one node
            found["cluster.gpus_per_node"] = _Found(per_node, "all GPUs of the job on one node", 1)
        else:
            raise UsageError(
                f"gpus: expected a multiple of gpus-per-node {per_node}, found {gpus}: "
                f"{gpus // per_node * per_node} or {-(-gpus // per_node) * per_node}"
            )
    split = [f"layout.{axis}" for axis in ("tp", "pp", "cp")]
    product = _whole(found, split[0]) * _whole(found, split[1]) * _whole(found, split[2])
    whole = "layout.dp" not in found and gpus % product
    if whole and all(found[name].layer <= 1 for name in split):
        for name in split:
            found[name] = _Found(1, f"the preset's {product} do not divide {gpus} GPUs: FSDP", 1)
        product = 1
    shown = " x ".join(f"{name.partition('.')[2].upper()} {found[name].value}" for name in split)
    if "layout.dp" not in found:
        if gpus % product:
            raise UsageError(f"layout: expected {shown} = {product} to divide gpus {gpus}")
        found["layout.dp"] = _Found(gpus // product, "GPUs / (TP x PP x CP)", 1)
    dp = _whole(found, "layout.dp")
    if product * dp != gpus:
        raise UsageError(
            f"layout: expected {shown} x DP {dp} = {product * dp} to equal gpus {gpus}"
        )
    ep = _whole(found, "layout.ep")
    within = gpus // _whole(found, "layout.pp")
    if within % ep:
        raise UsageError(
            f"layout: expected EP {ep} to divide the {within} GPUs of a pipeline stage"
        )
    if float(found["layout.skew"].value) < 1:
        raise UsageError(f"skew: expected 1 or more, found {found['layout.skew'].value}")
    return gpus // per_node


def _settle_times(found: dict[str, _Found]) -> None:
    """Cadences of the outer tiers, and rates that a preset left out."""
    cadence = found["checkpoint.cadence"]
    for key in ("peer_cadence", "durable_cadence"):
        each = found.setdefault(f"checkpoint.{key}", _Found(cadence.value, FOLLOWS_CADENCE, 1))
        if float(each.value) < float(cadence.value):
            raise UsageError(
                f"{key.replace('_', '-')}: expected the cadence {cadence.value:g} s or more, found "
                f"{each.value:g} s"
            )
    total = found.get("storage.filesystem")
    if total is not None:
        found.setdefault("storage.filesystem_read", _Found(total.value, "as its write", 1))
    quantile = float(found["checkpoint.quantile"].value)
    if not 0 < quantile < 1:
        raise UsageError(f"quantile: expected between 0 and 1, found {quantile:g}")


def _settle_failures(found: dict[str, _Found], nodes: int) -> None:
    """The job's MTBF and a node's rate from each other; shares that make a whole."""
    mtbf, rate = found.get("failures.mtbf"), found["failures.node_failures"]
    if mtbf is not None and mtbf.layer == rate.layer:
        raise UsageError("failures: expected mtbf or node-failures, found both")
    if mtbf is not None and mtbf.layer > rate.layer:
        per_node = DAY_S / (nodes * float(mtbf.value))
        found["failures.node_failures"] = _Found(per_node, "from the MTBF", mtbf.layer)
    else:
        source = f"86,400 s / ({nodes:,} nodes x {rate.value:.3g} a node and day)"
        found["failures.mtbf"] = _Found(DAY_S / (nodes * float(rate.value)), source, rate.layer)
    mtbf_s = float(found["failures.mtbf"].value)
    if not _SHORTEST_MTBF_S <= mtbf_s <= _LONGEST_MTBF_S:
        raise UsageError(f"mtbf: expected 1 s to 1e12 s for the job, found {mtbf_s:g} s")
    given = [name for name in _SHARES if found[name].layer > 1]
    if given and len(given) < len(_SHARES):
        rest = [name for name in _SHARES if name not in given]
        left = 1 - sum(float(found[name].value) for name in given)
        before = sum(float(found[name].value) for name in rest)
        for name in rest:
            part = left * float(found[name].value) / before if before else left / len(rest)
            found[name] = _Found(max(0.0, part), "what the given shares leave", 1)
    total = sum(float(found[name].value) for name in _SHARES)
    if abs(total - 1) > 1e-6:
        raise UsageError(f"failures: expected shares that sum to 100 %, found {total * 100:g} %")


def _whole(found: Mapping[str, _Found], name: str) -> int:
    return int(found[name].value) if name in found else 1


def _targets(section: str, key: str, where: str) -> list[tuple[str, Given]]:
    """The fields that a key sets."""
    if (section, key) == ("failures", RESTART.key):
        return [(f"failures.restart_{tier}", RESTART) for tier in TIERS]
    full = f"{section}.{key}"
    if full not in FIELDS:
        known = [name.partition(".")[2] for name in FIELDS if name.startswith(f"{section}.")]
        raise UsageError(f"{where}: unknown field{_near(key, known)}")
    return [(full, FIELDS[full][1])]


def _mapping(raw: object, where: str) -> Mapping[str, object]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping) or not all(isinstance(key, str) for key in raw):
        raise UsageError(f"{where}: expected fields and values, found {brief(raw, repr)}")
    return raw


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]}?" if near else f", expected {', '.join(known)}"
