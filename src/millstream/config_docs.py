"""Makes `docs/settings.md` from the table of settings."""

from __future__ import annotations

from itertools import groupby

from millstream.config import TABLE, Setting

_HEAD = """\
# Settings

This page is made from the table in `src/millstream/config.py` by `make docs`. Change the table,
not the page.

A setting can be given in four places. The first one that has it wins:

1. a flag: `mill serve --segment-bytes 256M`
2. the environment: `MILLSTREAM_SEGMENT_BYTES=256M`
3. a settings file, named by `--config` or `MILLSTREAM_CONFIG`: `segment_bytes = "256M"`
4. the default

`mill config show` prints what is in force, and where each value came from:

```
$ MILLSTREAM_FSYNC=interval mill config show --segment-bytes 256M
…
fsync                     interval         environment MILLSTREAM_FSYNC
…
segment_bytes             256M             flag --segment-bytes
```

All values are checked together at start. A wrong one ends the start, with exit code 2:

```
$ mill serve --http 8080 --kafka :9092
mill: setting_invalid: 2 settings cannot be used:
  http = '8080' (flag --http) is not HOST:PORT; use HOST:PORT, such as …
  kafka = ':9092' (flag --kafka) has no host; use HOST:PORT, such as …
```

**Sizes** are whole numbers with K, M, G or T, in binary units: `64K` is 65,536 bytes.
**Durations** are whole numbers with `ms`, `s`, `m`, `h` or `d`; the unit is never left out.
**Addresses** are `HOST:PORT`, or `off`.

## Settings files

A file is flat: one line a setting. TOML:

```toml
data = "/var/lib/millstream"
http = "0.0.0.0:8080"
retention_age = "30d"
```

YAML, where `${VAR:default}` stands for an environment variable:

```yaml
data: ${DATA_DIR:/var/lib/millstream}
http: 0.0.0.0:${PORT:8080}
retention_age: 30d
```

A name that is no setting is an error, with the name that was probably meant. An environment
variable that starts with `MILLSTREAM_` and is no setting is a warning.
"""


def settings_page() -> str:
    """The whole page."""
    sections = [
        f"\n## {section}\n" + "".join(_entry(setting) for setting in settings)
        for section, settings in groupby(TABLE, key=lambda setting: setting.section)
    ]
    return _HEAD + "".join(sections)


def _entry(setting: Setting) -> str:
    default = f"`{setting.default}`" if setting.default else "empty"
    expects = setting.kind.expects[0].upper() + setting.kind.expects[1:]
    return (
        f"\n### `{setting.name}`\n\n"
        f"{setting.causes}\n\n"
        f"- Default: {default}\n"
        f"- Takes: {expects}\n"
        f"- Flag `{setting.flag}`, environment `{setting.variable}`\n"
    )
