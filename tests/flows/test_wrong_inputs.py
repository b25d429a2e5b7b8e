"""Common mistakes of users: each command answers with one sentence and exit code 2, and
leaves no files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command

from gristmill.flows.cli.main import app
from tests.commands import call

MANIFEST = """\
name: good
sources: {a: {path: a.txt}}
tokenizer: {vocab_size: 300}
mix: {tokens: 2000, sequence_length: 32}
pretrain: {model: {layers: 1, width: 16, heads: 2}, steps: 4}
"""
FILES = {
    "a.txt": b"some text",
    "good.yaml": MANIFEST.encode(),
    "data.yaml": b"name: data\nsources: {a: {path: a.txt}}",
    "examples.yaml": b"""\
name: e
examples:
  e:
    data: [{path: prompts.jsonl}]
    model: {endpoint: "http://127.0.0.1:9/v1", model: m}
""",
    "digits.yaml": b"name: a\nseed: " + b"7" * 5000,
    "empty.yaml": b"",
    "binary.yaml": bytes(range(256)),
    "latin.yaml": b"name: caf\xe9\n",
    "list.yaml": b"- a\n- b\n",
    "broken.yaml": b"name: [a\nb: }",
    "code.yaml": b"name: !!python/object/apply:os.system ['touch harm']",
    "missing-source.yaml": b"name: a\nsources: {a: {path: not/*.txt}}",
    "nothing.jsonl": b"",
    "broken.jsonl": b"{\n",
    "keyless.jsonl": b'{"x": 1}\n',
    "prompts.jsonl": b'{"prompt": "a"}\n',
    "ids.txt": b"abc\n",
    "grid.yaml": b"- {a: 1}\n- {a: 2}\n",
    "other-grid.yaml": b"- {b: 1}\n",
    "a-file": b"x",
    "bare/config.json": b"{}",
    "folder.yaml/x": b"",
    "several-wrong.yaml": b"""\
name: several
sources:
  a: {path: no-a.txt}
  b: {path: "no-b/*.jsonl"}
prepare:
  - decontaminate:
      against:
        - no-e.jsonl
tokenizer:
  path: no-tokenizer.json
mix: {tokens: 2000, sequence_length: 32}
pretrain:
  model: {init_from: bare}
  steps: 4
""",
    "wrong-start.yaml": b"""\
name: start
sources: {a: {path: a.txt}}
tokenizer: {vocab_size: 300}
mix: {tokens: 2000, sequence_length: 32}
pretrain: {steps: 4, model: {init_from: folder.yaml}}
""",
}
WRONG_MANIFESTS = {
    "absent.yaml": "absent.yaml: there is no such file; correct the path, or write "
    "one with: gristmill new",
    "folder.yaml": "folder.yaml: it is a folder; name a file in it",
    "a-file/x.yaml": "a-file/x.yaml: a part of that path is a file, not a folder",
    "empty.yaml": "a manifest is a mapping that starts with `name:`",
    "list.yaml": "a manifest is a mapping that starts with `name:`",
    "binary.yaml": "binary.yaml: it is not UTF-8 text (byte 129 is 0x80); save it as "
    "UTF-8",
    "latin.yaml": "it is not UTF-8 text (byte 10 is 0xe9)",
    "broken.yaml": "broken.yaml:2: (syntax): not valid YAML: expected ',' or ']'",
    "code.yaml": "not valid YAML: could not determine a constructor",
    "missing-source.yaml": "not/*.txt; correct the pattern",
    "good.yaml --set nosuch.key=1": "--set nosuch.key: nosuch: unknown key; known "
    "here: documents, dpo, engine,",
    "good.yaml --set steps=5": "--set steps: unknown key, did you mean "
    "'pretrain.steps'",
    "good.yaml --set pretrain.stepz=5": "--set pretrain.stepz: unknown key, did you "
    "mean 'steps'?",
    "good.yaml --set mix.sequence_length=4096": "--set mix.sequence_length: a row of "
    "4096 tokens is longer than",
    "good.yaml --set tokenizer.path=broken.jsonl": (
        "--set tokenizer.path: {folder}/broken.jsonl is not a tokenizer.json that "
        "the tokenizers library reads"
    ),
    "good.yaml --set tokenizer.chat_template={%": "tokenizer.chat_template: ",
    "several-wrong.yaml": "5 problems in several-wrong.yaml; nothing was run",
    "wrong-start.yaml": (
        "wrong-start.yaml:5: pretrain.model.init_from: "
        "{folder}/folder.yaml/config.json does not exist; a model is"
    ),
    "good.yaml --set pretrain.steps": "write an override as key.path=value",
    "good.yaml --set pretrain.steps=many": "pretrain.steps: input should be a valid "
    "integer (got 'many')",
    "good.yaml --set pretrain.steps=-1": "pretrain.steps: input should be greater "
    "than 0 (got -1)",
    "good.yaml --set name=[1": "name: '[1' is not valid YAML: expected ',' or ']'",
    "good.yaml --set name.x=1": "name.x: cannot be overridden: there is nothing "
    "below 'good'",
    "good.yaml --set name=a/b": "name: a name is made of letters, digits",
    "good.yaml --set prepare=[] --set prepare.7=x": "prepare.7: cannot be "
    "overridden: there is no entry '7'",
    "good.yaml --set prepare=x": "prepare: must be a list (got 'x')",
    "good.yaml --set mix=5": "mix: must be a mapping (got 5)",
    f"good.yaml --set seed={'7' * 5000}": "7... 5002 characters is not valid YAML: a "
    "number of 5000 digits",
    "good.yaml --store memory://x": "would be in the memory of this process alone",
    "digits.yaml": "digits.yaml:2: (syntax): not valid YAML: a number of 5000 "
    "digits; at most 100 are allowed",
    "good.yaml --store a-file": "a-file: it is a file; name a folder",
    "good.yaml --store nosuch://x": "the store nosuch://x: Unsupported filesystem: "
    "'nosuch'; give a folder",
    "good.yaml --set sources.a.path=nosuch://x": "nosuch://x cannot be listed: "
    "Unsupported filesystem: 'nosuch'",
    "good.yaml --nosuch": "No such option: --nosuch",
}
OF_MANIFESTS = [
    "run {} --no-ui",
    "stage ingest {}",
    "status {}",
    "explain {} abc",
    "whatif {}",
    "dialects {}",
    "logs {}",
    "report {}",
    "verify {}",
    "trace {} --step 1",
    "takedown {} --ids ids.txt",
    "export-tokens {} --format llmc --out out",
    "chat {}",
    "generate {} prompts.jsonl",
    "evaluate {}",
    "browse {}",
    "search {} bread",
    "query {} select",
    "export-documents {} --format parquet --out out",
    "try json:loads --on a --manifest {}",
    "slurm {}",
    "mixtures sweep {} --weights grid.yaml --steps 2",
    "ladder {} --sizes 1m,3m --tokens-per-parameter 1,2,3",
    "ablate {} --each-rule --quick",
    "licences {}",
    "losses {}",
    "publish {} --cards out",
]
"""Every command that takes a manifest, except `plan`."""
WRONG_FOR_ALL = (
    "absent.yaml",
    "folder.yaml",
    "good.yaml --set name.x=1",
    "good.yaml --store a-file",
)
ANSWERS = {
    "lock nosuch.yaml": "nosuch.yaml: there is no such file",
    "run good.yaml --until nosuch": "no such stage: 'nosuch'; stages are generate, "
    "ingest, clean",
    "run good.yaml --until pretrian": "no such stage: 'pretrian', did you mean "
    "'pretrain'? stages are generate",
    "run good.yaml --force tokeniser": "good.yaml has no stage 'tokeniser', did "
    "you mean 'tokenizer'? it has ingest",
    "logs good.yaml tokenise": "good.yaml has no stage 'tokenise', did you mean "
    "'tokenize'? it has ingest",
    "run good.yaml --until sft": "good.yaml has no stage 'sft'; it has ingest, "
    "tokenizer",
    "run good.yaml --force nosuch": "good.yaml has no stage 'nosuch'; it has",
    "stage nosuch good.yaml": "no such stage: 'nosuch'",
    "stage good.yaml ingest": "no such stage: 'good.yaml'",
    "plan good.yaml --gpus 0": "greater than or equal to 1",
    "plan good.yaml --gpus 8 --gpu nosuch": "nosuch",
    "plan good.yaml --gpus 8 --mfu 2": "less than or equal to 1",
    "plan good.yaml --gpus 8 --peak-tflops 5": "--peak-tflops and --memory-gb belong "
    "together",
    "plan good.yaml --gpus 8 --price -1": "greater than or equal to 0",
    "plan good.yaml --gpu H100 --mfu 0.3": "--gpu, --mfu: only valid with --gpus; "
    "add it",
    "plan good.yaml --sample-mb 3": "--sample-mb: only valid with --predict",
    "plan data.yaml --gpus 8": "data.yaml has no `pretrain:` section",
    "logs good.yaml nosuch": "good.yaml has no stage 'nosuch'; it has ingest",
    "logs good.yaml ingest": "ingest",
    "report good.yaml --out bare": "--out bare is a folder; name a file, such as "
    "bare/FILE",
    "report good.yaml --out a-file/x.html": "a-file: ",
    "explain good.yaml abc": "no documents are read yet; run:",
    "search good.yaml bread": "no documents are read yet; run:",
    "search good.yaml bread --limit 0": "greater than or equal to 1",
    "search good.yaml bread --by smell": "'smell' is not one of 'meaning', 'words'",
    "whatif good.yaml --samples -1": "greater than or equal to 0",
    "dialects good.yaml --sample 0": "greater than or equal to 1",
    "compare last last": "has no runs yet; start one with: gristmill run MANIFEST",
    "compare ../.. last": "has no runs yet",
    "compare last": "Missing argument 'RUN'",
    "compare a b --store a-file": "a-file: it is a file; name a folder",
    "runs --store a-file": "a-file: it is a file; name a folder",
    "runs --store nosuch://x": "Unsupported filesystem",
    "runs more": "unexpected extra argument",
    "gc --store a-file": "a-file: it is a file; name a folder",
    "gc --store nosuch://x": "Unsupported filesystem",
    "gc --keep-runs 0": "greater than or equal to 1",
    "gc --keep-runs x": "valid integer",
    "verify absent": "absent/config.json does not exist",
    "verify a-file": "a-file/config.json does not exist",
    "verify bare --tokenizer absent": "absent",
    "trace good.yaml": "give one of --step N, --document ID and --text FILE",
    "trace good.yaml --step 1 --text a.txt": "give one of --step N",
    "trace good.yaml --text absent": "--text absent: there is no such file; correct "
    "the path",
    "trace good.yaml --text bare": "--text bare: it is a folder; name a file in it",
    "trace good.yaml --text latin.yaml": "--text latin.yaml: it is not UTF-8 text "
    "(byte 10 is 0xe9)",
    "trace good.yaml --text a.txt": "add the section `text_index: {}` after `mix:`, "
    "and run: ",
    "trace good.yaml --set text_index.shortest_span=1 --text a.txt": "text_index.shortest_span: input should be",
    "run data.yaml --set text_index={}": "text_index: needs a section `mix:` too, "
    "which is absent",
    "trace good.yaml --step 1 --document a": "give one of --step N",
    "trace good.yaml --step 0": "greater than or equal to 1",
    "trace good.yaml --step 1 --stage nosuch": "good.yaml has no `nosuch:` section",
    "trace good.yaml --step 1 --stage sft": "good.yaml has no `sft:` section",
    "trace good.yaml --step 1": "the mixture is not packed yet; run:",
    "takedown good.yaml --ids absent": "absent: there is no such file",
    "takedown good.yaml --ids bare": "bare: it is a folder",
    "takedown good.yaml --ids nothing.jsonl": "names no document; write an id",
    "takedown good.yaml --ids broken.jsonl": "broken.jsonl:1: begins like JSON, but "
    "is not",
    "takedown good.yaml --ids keyless.jsonl": "keyless.jsonl:1: has none of the keys",
    "takedown good.yaml --ids binary.yaml": "it is not UTF-8 text",
    "try json:loads": "Missing option '--on'",
    "try ./absent.py:f --on a.txt": "there is no file absent.py in",
    "try absent.module:f --on a.txt": "there is no module 'absent.module' in this "
    "environment",
    "try a.txt --on a.txt": "write a function as ./FILE.py:NAME",
    "try ./a.txt:f --on a.txt": "'./a.txt' is neither a file that ends in .py nor a "
    "module",
    "try https://example.org/a.py:f --on a.txt": "code must come from a file beside "
    "the manifest",
    "try json:loads --on absent": "absent does not exist",
    "try json:loads --on broken.jsonl": "no row of",
    "try json:loads --on b --manifest good.yaml": "--on: good.yaml has no source of "
    "documents 'b'; it has a",
    "try json:loads --on a.txt --documents 0": "greater than or equal to 1",
    "try json:loads --on a.txt --with x": "--with 'x': write --with NAME=VALUE",
    "try json:loads --on a.txt --min text=1": "'text' has another meaning for "
    "documents",
    "try json:loads --on a.txt --max x=many": "valid",
    "browse good.yaml --port 70000": "less than or equal to 65535",
    "query good.yaml select": "no documents are read yet; run:",
    "query examples.yaml select": "has no `sources:` section",
    "explain examples.yaml abc": "has no `sources:` section",
    "whatif data.yaml": "has no `prepare:` section",
    "export-documents good.yaml --out out": "Missing option '--format'",
    "export-documents good.yaml --format csv --out out": "'csv' is not one of "
    "'parquet', 'jsonl', 'hf'",
    "export-documents good.yaml --format hf --out out": "run:",
    "look absent": "absent does not exist; correct its path",
    "look broken.jsonl": "no row of",
    "look a.txt --out good.yaml": "good.yaml exists and was not changed",
    "annotators nosuch": "there is no annotator 'nosuch'",
    "recipes nosuch": "no recipe is called 'nosuch'; there are annealing",
    "demo --set pretrain.step=5": "pretrain.step: unknown key",
    "run demo --until tokeniser": "no such stage: 'tokeniser', did you mean 'tokenizer'?",
    "run recipe:finweb": "no recipe is called 'finweb', did you mean 'fineweb'?",
    "new good.yaml --source a.txt": "good.yaml exists and was not changed",
    "new x.yaml": "give the data: gristmill new --source PATH",
    "new x.yaml --source absent": "absent does not exist; correct its path",
    "new x.yaml --source=": "--source '': give a path, or NAME=PATH",
    "new x.yaml --source =a.txt": "--source '=a.txt': give a path, or NAME=PATH",
    "new x.yaml --source nothing.jsonl": "no row of",
    "new x.yaml --source broken.jsonl": "no row of",
    "new x.yaml --source nosuch://x": "nosuch://x cannot be listed",
    "new x.yaml --source a.txt --tokens 5": "greater than or equal to 20000",
    "new x.yaml --source a.txt --name a/b": "a name is made of letters",
    "new a-file/x.yaml --source a.txt": "a-file: file exists; correct the path",
    "schema more": "unexpected extra argument",
    "export-tokens good.yaml --out out": "Missing option '--format'",
    "export-tokens good.yaml --format nosuch --out out": "is not one of 'llmc'",
    "export-tokens good.yaml --format llmc --out out --shard-tokens 0": "greater than or equal to 1",
    "export-tokens data.yaml --format llmc --out out": "has no `mix:` section",
    "export-tokens good.yaml --format llmc --out out": "the mixture is not packed "
    "yet; run:",
    "report good.yaml --out /proc/x.html": "/proc/x.html: no such file or directory; "
    "correct the path",
    "chat absent": "absent/config.json does not exist",
    "chat bare": "bare has no tokenizer.json",
    "chat data.yaml": "data.yaml has no `pretrain:` section and no `model:`, so it "
    "has no model",
    "chat good.yaml": "no model is trained yet; run:",
    "chat bare --temperature -1": "greater than or equal to 0",
    "chat bare --top-p 2": "less than or equal to 1",
    "generate demo prompts.jsonl": "no model is trained yet; run:",
    "generate good.yaml absent": "absent: there is no such file",
    "generate good.yaml bare": "bare: it is a folder",
    "generate good.yaml nothing.jsonl": "nothing.jsonl has no lines",
    "generate good.yaml broken.jsonl": "broken.jsonl, line 1: not JSON",
    "generate good.yaml keyless.jsonl": "needs either `prompt`",
    "generate good.yaml binary.yaml": "it is not UTF-8 text",
    "generate good.yaml prompts.jsonl --out bare": "--out bare is a folder",
    "generate bare prompts.jsonl --top-p 0": "top_p is 0.0",
    "evaluate bare": "no tokenizer.json",
    "evaluate bare --tasks absent": "absent: there is no such file",
    "evaluate bare --tasks list.yaml": "list.yaml: the file: must be a mapping",
    "evaluate bare --tasks binary.yaml": "it is not UTF-8 text",
    "evaluate bare --tasks broken.yaml": "broken.yaml:2: not valid YAML",
    "evaluate bare --tasks good.yaml": "name: unknown key",
    "mixtures sweep good.yaml --weights absent --steps 2": "absent: there is no such "
    "file",
    "mixtures sweep good.yaml --weights binary.yaml --steps 2": "it is not UTF-8 text",
    "mixtures sweep good.yaml --weights empty.yaml --steps 2": "the file: must be a mapping; its keys are mixtures",
    "mixtures sweep good.yaml --weights list.yaml --steps 2": "mixtures.0: must be a "
    "mapping",
    "mixtures sweep good.yaml --weights other-grid.yaml --steps 2": "no such source or task: 'b'; there are a",
    "mixtures sweep good.yaml --weights grid.yaml --steps 0": "greater than or equal "
    "to 1",
    "mixtures sweep good.yaml --weights grid.yaml --steps 2 --model nosuch=3": "pretrain.model.nosuch: unknown key",
    "mixtures sweep good.yaml --weights grid.yaml --steps 2 --model layers": "--model 'layers': write --model NAME=VALUE",
    "mixtures sweep good.yaml --weights grid.yaml --steps 2 --target b=1": "--target: no such source or task: 'b'; there are a",
    "mixtures sweep good.yaml --weights grid.yaml --steps 2 --target a=-1": "the share of a is below 0",
    "mixtures sweep data.yaml --weights grid.yaml --steps 2": "data.yaml has no "
    "`mix:` and `pretrain:` sections",
    "serve --limit 0": "greater than or equal to 1",
    "up --port 70000": "less than or equal to 65534",
    "bench nosuch": "no such area: 'nosuch'; areas are dataprep, models",
    "bench dataprep --points 3": "--points belongs to the area chaos",
    "bench dataprep --markdown bare": "--markdown bare is a folder",
    "bench chaos --folder a-file --points 1": "a-file/project/web: not a directory",
    "nosuch": "No such command 'nosuch'",
}

COMMANDS = get_command(app)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    # Otherwise every command assembles them anew, which takes longer than most
    # commands.
    monkeypatch.setattr("typer.testing._get_command", lambda app: COMMANDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRISTMILL_STORE", str(tmp_path / "store"))
    return tmp_path


def assert_refused(command: str, sentence: str, project: Path) -> None:
    paths_before = set(project.rglob("*"))
    arguments = [part for part in command.split(" ") if part]

    result = call(*arguments, input="", terminal_width=1000, code=None)

    assert isinstance(result.exception, SystemExit), f"{command}: {result.exception!r}"
    assert (result.exit_code, sentence in result.output) == (2, True), (
        f"{command}:\n{result.output}"
    )
    assert "Errno" not in result.output, f"{command}:\n{result.output}"
    assert set(project.rglob("*")) == paths_before, f"{command} left files"


@pytest.mark.parametrize("manifest", WRONG_MANIFESTS)
def test_invalid_manifest_setting_or_store_is_rejected(manifest, project):
    assert_refused(
        f"plan {manifest}",
        WRONG_MANIFESTS[manifest].replace("{folder}", str(project)),
        project,
    )


def test_every_missing_file_is_reported_at_once_with_line_and_key(project):
    result = call("plan", "several-wrong.yaml", code=2, terminal_width=1000)

    assert [
        line.partition(f"{project}/")[0] + line.partition(f"{project}/")[2][:16]
        for line in (result.output.splitlines())
    ] == [
        "several-wrong.yaml:3: sources.a.path: no-a.txt does no",
        "several-wrong.yaml:4: sources.b.path: no file matches no-b/*.jsonl; co",
        "several-wrong.yaml:8: prepare[0].decontaminate.against[0].path: no-e.jsonl "
        "does ",
        "several-wrong.yaml:10: tokenizer.path: no-tokenizer.jso",
        "several-wrong.yaml:13: pretrain.model.init_from: bare: config.jso",
        "5 problems in several-wrong.yaml; nothing was run",
    ]


@pytest.mark.parametrize("command", OF_MANIFESTS)
def test_every_command_rejects_an_invalid_manifest_setting_or_store(command, project):
    for manifest in WRONG_FOR_ALL:
        assert_refused(command.format(manifest), WRONG_MANIFESTS[manifest], project)


@pytest.mark.slow
@pytest.mark.parametrize("command", ANSWERS)
def test_invalid_argument_is_rejected(command, project):
    assert_refused(command, ANSWERS[command], project)


def test_every_command_is_covered():
    tried = {command.split(" ")[0] for command in [*OF_MANIFESTS, *ANSWERS]}

    assert {
        command.name or command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
    } <= tried


def test_unreadable_store_is_reported_without_traceback(project, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(13, "Permission denied", "/locked")

    monkeypatch.setattr("gristmill.flows.running.run_records.collect", refuse)
    assert_refused(
        "gc", "/locked: permission denied; correct the path, its permissions", project
    )
