"""Language codes: normalised labels of language models.

lid.176 uses Wikipedia's codes, mostly ISO 639-1: they are kept, in lower case. GlotLID
and NLLB use ISO 639-3 with ISO 15924 (`eng_Latn`): the language is converted to ISO
639-1 if it has such a code, so that `en` is the same for all models. The standard form
of a macrolanguage gets the macrolanguage's code (`cmn` and `arb` become `zh` and `ar`),
as in the language aliases of Unicode CLDR.

The column `language` thus has `de` for `__label__de` of lid.176 and for
`__label__deu_Latn` of GlotLID or OpenLID, with the script in the column `script`.
Manifests accept both: `de` matches every script; `de_Latn` and `deu_Latn` are
equivalent and match one script.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

LABEL_PREFIX = "__label__"
LANGUAGE_AND_SCRIPT = re.compile(r"([a-z]{2,3})_([A-Z][a-z]{3})")


class Language(NamedTuple):
    """Language of a label; `script` is an ISO 15924 code, or empty if the label has
    none.
    """

    code: str
    script: str

    def __str__(self) -> str:
        return f"{self.code}_{self.script}" if self.script else self.code


EVERY_OTHER = "*"
"""Key in a manifest for all languages that it does not list."""
Value = TypeVar("Value")
Languages = Sequence[str | None]
"""Language of each text; None if it is unknown."""


def _table(pairs: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in pairs.split())


ISO_639_1 = _table("""
aar:aa abk:ab afr:af aka:ak amh:am ara:ar arg:an asm:as ava:av ave:ae aym:ay aze:az bak:ba bam:bm bel:be ben:bn
bis:bi bod:bo bos:bs bre:br bul:bg cat:ca ces:cs cha:ch che:ce chu:cu chv:cv cor:kw cos:co cre:cr cym:cy dan:da
deu:de div:dv dzo:dz ell:el eng:en epo:eo est:et eus:eu ewe:ee fao:fo fas:fa fij:fj fin:fi fra:fr fry:fy ful:ff
gla:gd gle:ga glg:gl glv:gv grn:gn guj:gu hat:ht hau:ha hbs:sh heb:he her:hz hin:hi hmo:ho hrv:hr hun:hu hye:hy
ibo:ig ido:io iii:ii iku:iu ile:ie ina:ia ind:id ipk:ik isl:is ita:it jav:jv jpn:ja kal:kl kan:kn kas:ks kat:ka
kau:kr kaz:kk khm:km kik:ki kin:rw kir:ky kom:kv kon:kg kor:ko kua:kj kur:ku lao:lo lat:la lav:lv lim:li lin:ln
lit:lt ltz:lb lub:lu lug:lg mah:mh mal:ml mar:mr mkd:mk mlg:mg mlt:mt mon:mn mri:mi msa:ms mya:my nau:na nav:nv
nbl:nr nde:nd ndo:ng nep:ne nld:nl nno:nn nob:nb nor:no nya:ny oci:oc oji:oj ori:or orm:om oss:os pan:pa pli:pi
pol:pl por:pt pus:ps que:qu roh:rm ron:ro run:rn rus:ru sag:sg san:sa sin:si slk:sk slv:sl sme:se smo:sm sna:sn
snd:sd som:so sot:st spa:es sqi:sq srd:sc srp:sr ssw:ss sun:su swa:sw swe:sv tah:ty tam:ta tat:tt tel:te tgk:tg
tgl:tl tha:th tir:ti ton:to tsn:tn tso:ts tuk:tk tur:tr twi:tw uig:ug ukr:uk urd:ur uzb:uz ven:ve vie:vi vol:vo
wln:wa wol:wo xho:xh yid:yi yor:yo zha:za zho:zh zul:zu
""")
"""ISO 639-3 code -> ISO 639-1 code."""
STANDARD_FORMS = _table("""
als:sq arb:ar ayr:ay azj:az cmn:zh cwd:cr ekk:et esk:ik fat:ak fuc:ff gaz:om gug:gn ike:iu khk:mn kmr:ku knc:kr
kng:kg kpv:kv lvs:lv npi:ne ojg:oj ory:or pbt:ps pbu:ps pes:fa plt:mg quy:qu quz:qu src:sc swh:sw uzn:uz ydd:yi
zsm:ms zyb:za
""")
"""ISO 639-3 code of a macrolanguage's standard form -> ISO 639-1 code of the
macrolanguage.
"""


LID_176 = tuple(
    """
af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da de diq
dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie ilo io is
it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl
my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh
si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh
""".split()
)
"""Codes of lid.176's labels."""


def short_code(code: str) -> str:
    """ISO 639-1 code for an ISO 639-3 code, or the code itself if there is none."""
    return ISO_639_1.get(code) or STANDARD_FORMS.get(code, code)


@lru_cache(maxsize=10_000)
def parse_label(label: str) -> Language:
    """Language of a model's label, or of a code in a manifest: `__label__eng_Latn` is
    (`en`, `Latn`).
    """
    name = label.removeprefix(LABEL_PREFIX)
    if parts := LANGUAGE_AND_SCRIPT.fullmatch(name):
        return Language(short_code(parts[1]), parts[2])
    return Language(name.lower(), "")


def best_match(language: Language, named: Mapping[str, Value]) -> Value | None:
    """Value of a language in a mapping: that of its script, else of all scripts, else
    of EVERY_OTHER; None without one.

    Args:
        named: a language as `str(parse_label(...))`, or EVERY_OTHER -> value.
    """
    names = (f"{language.code}_{language.script}", language.code, EVERY_OTHER)
    return next((named[name] for name in names if name in named), None)


def is_kept(language: Language, wanted: Mapping[str, Value]) -> bool:
    """Return True if these keys keep any document of a language, in its script or in
    any.
    """
    has_script_key = not language.script and any(
        name.startswith(f"{language.code}_") for name in wanted
    )
    return has_script_key or best_match(language, wanted) is not None
