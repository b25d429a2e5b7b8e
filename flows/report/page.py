"""The report of a run: one self-contained HTML file, readable on a phone, on paper and without a network."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import atomic_write
from gristmill.dataprep.secrets import mask_known, mask_secrets
from gristmill.flows.facts import Facts, gather_facts
from gristmill.flows.questions.status import duration
from gristmill.flows.report.alignment import distillation, preference_effects, reward_model, rounding
from gristmill.flows.report.documents import document_sections
from gristmill.flows.report.evaluation import evaluation_sections
from gristmill.flows.report.examples import dropped_before, example_sections, preferences
from gristmill.flows.report.html import contents, details, figure, listing, page, table
from gristmill.flows.report.mixture_table import limits_note, mixture_rows, mixture_table, prefix_note, stage_table
from gristmill.flows.report.reinforcement import reinforcement
from gristmill.flows.report.summary import evaluated_models, loss_rows, packing_rows
from gristmill.flows.report.tokens import tokenizer_section
from gristmill.flows.running.session import Session
from gristmill.flows.store.runs import RunRecord
from gristmill.train.loop.spike_report import describe_origin

MOST_SUSPECTS = 5
EXCERPT = 300
"""Characters of a suspect's text."""


def write_report(session: Session, record: RunRecord) -> Path:
    """Write `report.html` into a run's folder."""
    path = record.folder / "report.html"
    with atomic_write(path) as sink:
        sink.write(mask_known(render_report(session, record.content)).encode())
    return path


def render_report(session: Session, record: dict[str, Any] | None) -> str:
    """The HTML of everything that is committed for a manifest."""
    facts = gather_facts(session)
    sections = [
        *document_sections(facts), tokenizer_section(facts), tokens(facts), training(facts), spikes(facts),
        *example_sections(facts), masks(facts), distillation(facts), preferences(facts), reward_model(facts),
        preference_effects(facts), reinforcement(facts),
        *evaluation_sections(facts), rounding(facts), samples(facts), costs(facts),
        lineage(facts, record),
    ]
    links, body = contents("\n".join(section for section in sections if section))
    return page(facts["name"], f"{header(facts, record)}\n{links}\n{body}")


def header(facts: Facts, record: dict[str, Any] | None) -> str:
    """Name, time and the four numbers that people ask for first."""
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(record["started"] if record else time.time()))
    state = f", {record['state']}" if record else ""
    cards = []
    if facts["funnel"]:
        first, last = facts["funnel"][0], facts["funnel"][-1]
        cards += [("documents read", f"{first['read']:,}"), ("documents kept", f"{last['kept']:,}")]
    if "packed" in facts:
        cards.append(("training tokens", f"{sum(row['tokens'] for row in mixture_rows(facts)):,}"))
    for row in loss_rows(facts)[:1]:
        cards.append(("pre-training loss", f"{row['last']:.3f}"))
    seconds = sum(stage["seconds"] or 0 for stage in facts["stages"])
    cards.append(("time of all stages", duration(seconds)))
    shown = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in cards)
    return (f'<h1>{escape(facts["name"])}</h1><p class="note">gristmill run of {started}{state}</p>'
            f'<div class="cards">{shown}</div>')


def tokens(facts: Facts) -> str:
    """Tokenizer and mixture."""
    if "packed" not in facts:
        return ""
    from gristmill.flows.report.pictures import stacked_bars

    rows = mixture_rows(facts)
    summary = facts["summaries"].get("tokenizer", {})
    per_token = summary.get("bytes_per_token", {})
    note = ", ".join(f"{name} {'none left' if value is None else format(value, '.2f')}"
                     for name, value in per_token.items())
    return (
        '<h2>Mixture</h2><p class="note">Vocabulary of '
        f'{facts["packed"]["tokenizer"]["vocab_size"]:,}; bytes per token of documents that the merges were not '
        f"learnt from: {escape(note)}. Rows of {facts['packed']['sequence_length']} tokens.</p>"
        + figure(stacked_bars([("asked for", {row["source"]: row["requested"] for row in rows}),
                               ("packed", {row["source"]: row["share"] for row in rows})], "share of tokens"),
                 "Shares of tokens, requested and realised.")
        + "".join(table(*found, set(range(1 if found[0][0] == "source" else 2, len(found[0]))))
                  for found in (mixture_table(facts, 3), stage_table(facts, 3)) if found is not None)
        + "".join(f'<p class="note">{escape(note)}</p>' for note in (limits_note(facts), prefix_note(facts)) if note)
        + packing(facts))


def packing(facts: Facts) -> str:
    """What the packing cuts, drops and pads, beside the other ones."""
    rows = packing_rows(facts)
    if not rows:
        return ""
    return (
        '<h3>Packing</h3><p class="note">The same documents in rows of every kind: the share of documents that a '
        "row's end cuts, of tokens that belong to them, of tokens that no row holds, and of the rows that is "
        "padding.</p>"
        + table(["packing", "rows", "cut documents", "tokens in them", "dropped", "padding"], [
            [row["packing"] + (" (used)" if row["used"] else ""), f"{row['rows']:,}", f"{row['split']:.3%}",
             f"{row['in_split']:.3%}", f"{row['dropped']:.3%}", f"{row['padding']:.3%}"] for row in rows],
            {1, 2, 3, 4, 5}))


def training(facts: Facts) -> str:
    """Loss curves, in total and per source."""
    if not facts["training"]:
        return ""
    from gristmill.flows.report.pictures import curves

    parts = ["<h2>Training</h2>"]
    for stage, record in facts["training"].items():
        steps = [line for line in record if "loss" in line]
        if not steps:
            continue
        parts += [figure(curves(series, "step", label), f"{stage}: training {what}")
                  for what, label, series in (("loss", "loss", by_source(steps, "loss")),
                                              ("bits per byte", "bits per byte", by_source(steps, "bits_per_byte")))
                  if series]
        validation: dict[str, list[tuple[float, float]]] = {}
        for line in record:
            for source, values in line.get("validation", {}).items():
                validation.setdefault(source, []).append((line["step"], values["bits_per_byte"]))
        # One measurement is no curve; it stands in the table of held-out text.
        if any(len(points) > 1 for points in validation.values()):
            parts.append(figure(curves(validation, "step", "bits per byte"), f"{stage}: held-out bits per byte"))
        held_out = [(line["step"], line["held_out"]["loss"]) for line in record if "held_out" in line]
        if len(held_out) > 1:
            # With a teacher the loss is not of the labels alone.
            trained = [(line["step"], line.get("label_loss", line["loss"])) for line in steps]
            parts.append(figure(curves({"trained": trained, "held out": held_out}, "step", "loss"),
                                f"{stage}: loss on the conversations that are trained on, and on those held out"))
        if stage == "dpo" and any("rewards/margins" in line for line in steps):
            margins = {name: [(line["step"], line[f"rewards/{name}"]) for line in steps if f"rewards/{name}" in line]
                       for name in ("chosen", "rejected", "margins")}
            parts.append(figure(curves(margins, "step", "reward"), "dpo: rewards"))
    rows = [[row["stage"], row["steps"], f"{row['first']:.4f}", f"{row['last']:.4f}"] for row in loss_rows(facts)]
    return "".join(parts) + table(["stage", "steps", "first loss", "last loss"], rows, {1, 2, 3})


def by_source(steps: list[dict[str, Any]], key: str) -> dict[str, list[tuple[float, float]]]:
    """(step, value) of a training's record, of everything and of every source where there are several."""
    series: dict[str, list[tuple[float, float]]] = {}
    for line in steps:
        for name, values in (("all", line), *line.get("sources", {}).items()):
            if key in values:
                series.setdefault(name, []).append((line["step"], values[key]))
    return series if len(series) != len(("all", "one")) else {"all": series["all"]}


def spikes(facts: Facts) -> str:
    """Steps whose update was left out for their loss, with the documents that had the worst of it."""
    parts = []
    for stage, found in facts.get("spikes", {}).items():
        for step in found:
            suspects = set(step["suspects"])
            rows = [(_loss(one["loss"]), " ".join(str(one[key]) for key in ("source", "id") if one.get(key))
                     + (f" · {origin}" if (origin := describe_origin(one)) else ""),
                     " ".join(str(one.get("text") or "").split())[:EXCERPT])
                    for one in step["documents"] if one["id"] in suspects][:MOST_SUSPECTS]
            title = (f"{stage}, step {step['step']}: loss {_loss(step['loss'])}, where {_loss(step.get('mean'))} was "
                     f"usual; {len(suspects)} suspect{'s' * (len(suspects) != 1)}")
            parts.append(details(title, listing("The suspects: loss, source, id, where from, how judged", rows)))
    return "<h2>Spikes</h2>" + "".join(parts) if parts else ""


def _loss(value: float | None) -> str:
    return "no number" if value is None else f"{value:.3f}"


def masks(facts: Facts) -> str:
    """Which tokens supervised fine-tuning trains on: counts per set, and decoded examples."""
    summary = facts["summaries"].get("sft_data", {})
    if not summary.get("samples"):
        return ""
    rows = [[one["name"], f"{one['records']:,}", f"{one['refused']:,}", dropped_before(one), f"{one['unrenderable']:,}",
             f"{one['dropped']:,}", f"{one['truncated']:,}", f"{one['used']:,}", f"{one['drawn_share']:.1%}",
             f"{one['trained_share']:.1%}", f"{one['end_of_turn_share']:.2%}"] for one in summary["sets"]]
    headings = ["set", "records", "refused", "dropped before", "not rendered", "too long", "cut", "used",
                "share of trained tokens", "tokens trained", "ends of turn trained"]
    shown = "".join(f'<p class="note">{escape(one["set"])}, example {escape(one["example"])}</p><pre>' + "".join(
        f'<span class="{"trained" if trained else "masked"}">{escape(text)}</span>' for text, trained in one["spans"])
        + "</pre>" for one in summary["samples"])
    replay, tuned = summary["replay"], facts["summaries"].get("sft", {})
    proved, measured = tuned.get("step_0"), tuned.get("held_out")
    held_out = sum(one.get("held_out", 0) for one in summary["sets"])
    note = (f"{summary['rows']:,} rows of {summary['sequence_length']:,} tokens, {summary['fill']:.1%} full"
            + (f"; {replay['share']:.1%} of the tokens are replayed from pre-training" if replay["rows"] else "")
            + (f"; before the first step the loss was {proved['loss']:.4f} packed and {proved['loss_unpacked']:.4f} "
               f"one by one, and gradients of micro-batches were {proved['accumulation_difference']:.1e} from those of "
               "one batch" if proved else "")
            + (f"; {held_out:,} of the used examples are held out" if held_out else "")
            + (f", whose loss is {measured['loss']:.4f} in the end" if measured else ""))
    return ('<h2>What fine-tuning trains on</h2>' + table(headings, rows, set(range(1, len(headings))))
            + f'<p class="note">{escape(note)}. Marked text is trained on; the rest is context.</p>{shown}')


def samples(facts: Facts) -> str:
    """Generated texts."""
    parts = []
    for model, measured in evaluated_models(facts):
        # A tuned model answers the prompt; the pre-trained one continues it.
        does, between = ("continues a text", "") if model == "pretrain" else ("answers a prompt", "\n")
        if measured["samples"]:
            parts.append(f"<h3>{escape(model)}: {does}</h3>")
        parts += [f'<pre><b>{escape(sample["prompt"])}</b>{between}{escape(sample["completion"])}</pre>'
                  for sample in measured["samples"]]
    return f"<h2>Samples</h2>{''.join(parts)}" if parts else ""


def costs(facts: Facts) -> str:
    """Time, processor time, memory and disk of every stage."""
    from gristmill.flows.report.pictures import stacked_bars

    done = [stage for stage in facts["stages"] if stage["seconds"] is not None]
    if not done:
        return ""
    rows = [[stage["stage"], f"{stage['seconds']:,.1f}", f"{stage['bytes'] / 1e6:,.2f}",
             f"{stage['cost']['cpu_seconds']:,.1f}" if stage["cost"] else "",
             f"{stage['cost']['peak_memory_bytes'] / 1e6:,.0f}" if stage["cost"] else ""] for stage in done]
    return ("<h2>Time and cost</h2>"
            + figure(stacked_bars([(stage["stage"], {"seconds": stage["seconds"]}) for stage in done], "seconds"),
                     "Time of every stage when it was made, also where this run found it made.")
            + table(["stage", "seconds", "MB written", "CPU seconds", "MB of memory"], rows, {1, 2, 3, 4}))


def lineage(facts: Facts, record: dict[str, Any] | None) -> str:
    """Every stage's output and what it was made from; versions; the manifest as it was resolved."""
    import yaml

    rows = [[stage["stage"], stage["fingerprint"], ", ".join(stage["inputs"]) or "the sources",
             "" if stage["seconds"] is not None else "not made"] for stage in facts["stages"]]
    versions: dict[str, str] = next((s["versions"] for s in reversed(facts["stages"]) if s["versions"]), {})
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    manifest = yaml.safe_dump(mask_secrets(record["manifest"]), sort_keys=False, allow_unicode=True) if record else ""
    return (
        "<h2>Lineage</h2>" + table(
            ["stage", "fingerprint", "made from", ""], rows, set())
        + f'<p class="note">{escape(text)}</p><p class="note">Store: <code>{escape(facts["store"])}</code></p>'
        + ('<details><summary>The manifest, with every default</summary>'
           f'<pre class="long">{escape(manifest)}</pre></details>' if manifest else ""))
