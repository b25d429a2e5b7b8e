"""Headings of the commands in `gristmill --help`, and an example of each command."""

from __future__ import annotations

GROUPS: dict[str, dict[str, str]] = {
    "Run": {
        "demo": "gristmill demo",
        "run": "gristmill run mine.yaml --until dedup --set "
        "dedup.minhash.threshold=0.8",
        "stage": "gristmill stage filter mine.yaml --force",
        "plan": "gristmill plan mine.yaml --predict",
        "status": "gristmill status mine.yaml",
        "logs": "gristmill logs mine.yaml pretrain --follow",
        "mixtures": "gristmill mixtures sweep mine.yaml --weights grid.yaml --steps "
        "200",
        "ablate": "gristmill ablate mine.yaml --each-rule --quick",
        "ladder": "gristmill ladder mine.yaml --sizes 1m,3m,10m "
        "--tokens-per-parameter 5,20",
    },
    "Ask": {
        "explain": "gristmill explain mine.yaml 02739b49",
        "search": 'gristmill search mine.yaml "how bread is baked" --limit 5',
        "query": 'gristmill query mine.yaml "select source, count(*) from documents '
        'group by 1"',
        "licences": "gristmill licences mine.yaml --json",
        "whatif": "gristmill whatif mine.yaml --set filter.gopher_quality.min_words=40",
        "losses": "gristmill losses mine.yaml",
        "dialects": "gristmill dialects mine.yaml",
        "trace": "gristmill trace mine.yaml --step 1200",
        "compare": "gristmill compare last-1 last",
        "report": "gristmill report mine.yaml --out report.html",
        "runs": "gristmill runs",
        "browse": "gristmill browse mine.yaml",
    },
    "Data": {
        "look": "gristmill look data/ --out mine.yaml",
        "new": "gristmill new mine.yaml --source web=crawl/ --source books.jsonl "
        "--language en",
        "recipes": "gristmill recipes fineweb",
        "annotators": "gristmill annotators fineweb-edu",
        "try": 'gristmill try ./mine.py:is_recipe --on "data/*.jsonl"',
        "lock": "gristmill lock mine.yaml",
        "schema": "gristmill schema",
        "publish": "gristmill publish mine.yaml --cards cards/",
        "export-documents": "gristmill export-documents mine.yaml --format parquet "
        "--out clean/",
        "export-tokens": "gristmill export-tokens mine.yaml --format megatron --out "
        "tokens/",
        "takedown": "gristmill takedown mine.yaml --ids ids.txt",
    },
    "Models": {
        "chat": "gristmill chat mine.yaml",
        "generate": "gristmill generate mine.yaml prompts.jsonl --out answers.jsonl",
        "evaluate": "gristmill evaluate mine.yaml --tasks tasks.yaml",
    },
    "Serve": {
        "up": "gristmill up mine.yaml",
        "serve": "gristmill serve mine.yaml --limit 2",
        "slurm": "gristmill slurm mine.yaml --out jobs/",
    },
    "Maintain": {
        "verify": "gristmill verify mine.yaml --repair",
        "gc": "gristmill gc --keep-runs 3 --delete",
        "bench": "gristmill bench dataprep",
    },
}
"""Heading -> command -> example, in the order of the help."""
EXAMPLES = {
    name: example for commands in GROUPS.values() for name, example in commands.items()
}
EXAMPLES["sweep"] = EXAMPLES["mixtures"]
