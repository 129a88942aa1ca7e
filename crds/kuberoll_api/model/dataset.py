"""The prompts: source of the rows, limits and repeats."""

from __future__ import annotations

import difflib
from typing import Annotated, Final, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from kuberoll_api.model.contradictions import contradiction, reject_duplicates
from kuberoll_api.model.traits import IDENTITY, OPERATION
from kuberoll_api.model.types import (
    MAX_COUNT,
    MAX_SEED,
    DnsLabel,
    JsonObject,
    LongText,
    Model,
    Name,
    keyed_by,
)
from kuberoll_api.paths import Path


class GeneratorSource(Model):
    """Rows that the environments themselves generate, through `generate_dataset(count, seed)`."""

    environments: list[Name] = Field(
        default_factory=list, max_length=64, description="Environments that generate rows, in this order; none: all."
    )
    count: int = Field(ge=1, le=100_000_000, description="Number of rows of each environment.")
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of the generator.")


class ConfigMapSource(Model):
    """Rows in a ConfigMap."""

    name: DnsLabel = Field(description="Name of the ConfigMap, in the job's namespace.")
    key: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(
        default="dataset.jsonl", description="Key that holds the rows as JSON lines."
    )


class PersistentVolumeSource(Model):
    """Rows in a file on a persistent volume."""

    claim_name: DnsLabel = Field(description="Name of the PersistentVolumeClaim, in the job's namespace.")
    path: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Path of the file inside the volume."
    )


class HuggingFaceSource(Model):
    """Rows of a dataset of the Hugging Face hub, through the `datasets` package; streamed."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Hub id, or a local directory that `datasets` can load (relative to the manifest)."
    )
    config: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        default=None, description="Configuration of the dataset, if it has several."
    )
    split: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        default="train", description="Split of the dataset."
    )
    revision: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = Field(
        default=None, description="Branch, tag or commit of the dataset."
    )


class DatasetSource(Model):
    """Source of the prompts: exactly one of these fields."""

    # Not a CEL rule: CEL does not see `rows`, because free-form values have no type there.
    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    uri: Annotated[str, StringConstraints(min_length=1, max_length=2048)] | None = Field(
        default=None,
        description="A file of JSON lines (also .gz, .zst) or Parquet, or a directory or pattern of such files: a path "
        "(relative to the manifest), or a URI of any fsspec file system (s3://, gs://, https://, ...).",
    )
    huggingface: HuggingFaceSource | None = Field(default=None, description="A dataset of the Hugging Face hub.")
    rows: list[JsonObject] | None = Field(default=None, max_length=10_000, description="Rows written in the manifest.")
    generator: GeneratorSource | None = Field(default=None, description="Rows that the environments generate.")
    config_map: ConfigMapSource | None = Field(default=None, description="Rows in a ConfigMap; cluster only.")
    pvc: PersistentVolumeSource | None = Field(default=None, description="Rows on a volume; cluster only.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        fields = type(self).model_fields
        given = [to_camel(name) for name in fields if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise contradiction(f"set one of {', '.join(map(to_camel, fields))}; found {found}")
        return self


class PromptTemplate(Model):
    """Template that makes messages from a row's fields: `{question}` is replaced, `{{` and `}}` are braces."""

    system: LongText | None = Field(default=None, description="The system message.")
    user: LongText = Field(description="The user message.")


Columns = dict[str, Annotated[str, StringConstraints(min_length=1, max_length=1024)]]
"""Names of a dataset's own fields, by the names that KubeRoll reads."""

COLUMN_TARGETS: Final = (
    "prompt", "messages", "task_name", "task_id", "idx", "stop_strings", "tools", "metadata", "sampling"
)  # fmt: skip
_OPEN_TARGETS: Final = ("metadata", "sampling")


def _check_columns(columns: Columns, template: PromptTemplate | None) -> None:
    """Check the names that columns are mapped to.

    Raises:
        PydanticCustomError: One is unknown, or two exclude each other.
    """
    for target in columns:
        head, dot, rest = target.partition(".")
        if head not in COLUMN_TARGETS or (dot and (head not in _OPEN_TARGETS or "" in rest.split("."))):
            near = difflib.get_close_matches(target, COLUMN_TARGETS, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise contradiction(
                f"is not a field that KubeRoll reads: {', '.join(COLUMN_TARGETS)}, metadata.NAME, sampling.NAME. "
                f"KubeRoll's name is on the left, the dataset's on the right.{hint}",
                "columns",
                target,
            )
        parents = [target[:end] for end, letter in enumerate(target) if letter == "." and target[:end] in columns]
        if parents:
            raise contradiction(f"excludes {parents[0]}, which contains it; remove one of the two", "columns", target)
    prompts = [target for target in ("prompt", "messages") if target in columns]
    if len(prompts) == 2:
        raise contradiction("excludes prompt; a row has one prompt: remove one of the two", "columns", "messages")
    if prompts and template is not None:
        raise contradiction(
            f"excludes columns.{prompts[0]}: both make the prompt. Use the field in the template, "
            f"{{{columns[prompts[0]]}}}, and remove it from columns",
            "promptTemplate",
        )


class DatasetPart(Model):
    """One of several sources of rows, and the form of its rows."""

    name: Annotated[Name, IDENTITY] = Field(
        description="Name of the source: it is in the rows' metadata as `dataset_source`, and begins their `idx`."
    )
    source: Annotated[DatasetSource, OPERATION] = Field(description="Source of the rows.")
    weight: Annotated[float | None, IDENTITY] = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Share of the rows, relative to the other weights. The mixture ends with the first source that has "
        "no more rows. Absent, of all sources: all rows of each.",
    )
    limit: Annotated[int | None, IDENTITY] = Field(
        default=None, ge=1, le=MAX_COUNT, description="Use only the first rows of this source; absent: all."
    )
    environment: Annotated[Name | None, IDENTITY] = Field(
        default=None, description="Environment of the rows that have no `task_name`."
    )
    columns: Annotated[Columns, IDENTITY] = Field(
        default_factory=dict, max_length=64, description="As dataset.columns, for this source."
    )
    prompt_template: Annotated[PromptTemplate | None, IDENTITY] = Field(
        default=None, description="As dataset.promptTemplate, for this source."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_columns(self.columns, self.prompt_template)
        return self


class Certify(Model):
    """Demand that the rewards of each row were tried by `kuberoll certify`."""

    mode: Literal["Require", "Warn", "Ignore"] = Field(
        default="Ignore",
        description="Require: a run is refused before any engine starts if a row has no valid certificate. Warn: that "
        "is logged. Ignore: certificates are not read.",
    )
    file: Annotated[str, StringConstraints(min_length=1, max_length=2048)] | None = Field(
        default=None,
        description="The certificates, a path (relative to the manifest) or a URI; absent: the dataset's path with "
        "`.certificates.jsonl` at its end, or a file of the job's name beside the manifest.",
    )
    repetitions: int = Field(
        default=5, ge=1, le=1000, description="Least number of times that each answer must have been graded."
    )
    strict: bool = Field(
        default=False, description="Rows count as refused of which a certificate says that something is unproven."
    )


class Dataset(Model):
    """The prompts, and the number of samples of each."""

    source: Annotated[DatasetSource | None, OPERATION] = Field(default=None, description="Source of the rows.")
    sources: list[DatasetPart] = Field(
        default_factory=list,
        max_length=16,
        json_schema_extra=keyed_by("name"),
        description="Several sources of rows, instead of one.",
    )
    limit: Annotated[int | None, IDENTITY] = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Use only the first rows, after shuffling and mixing; absent: all.",
    )
    shuffle_seed: Annotated[int | None, IDENTITY] = Field(
        default=None,
        ge=0,
        le=MAX_SEED,
        description="Seed of a random order of the rows; absent: the order of the source.",
    )
    epochs: Annotated[int | None, IDENTITY] = Field(
        default=1,
        ge=1,
        le=65536,
        description="Number of passes over the rows; null: until the consumer stops the run. With shuffleSeed each is "
        "in an order of its own. Each pass has further samples of the same tasks, in prompt groups of their own.",
    )
    repeats: Annotated[int, IDENTITY] = Field(
        default=1, ge=1, le=65536, description="Samples per prompt: the size of a prompt group."
    )
    columns: Annotated[Columns, IDENTITY] = Field(
        default_factory=dict,
        max_length=64,
        description="Names of the dataset's own fields, by KubeRoll's: `prompt`, `messages`, `task_name`, `task_id`, "
        "`idx`, `stop_strings`, `tools`, `metadata`, `metadata.NAME`, `sampling`, `sampling.NAME`. Dots lead into "
        "objects and lists: `reward_model.ground_truth`, `prompt.0.content`.",
    )
    prompt_template: Annotated[PromptTemplate | None, IDENTITY] = Field(
        default=None, description="Template of the prompt for rows that have neither `messages` nor `prompt`."
    )
    certify: Annotated[Certify, OPERATION] = Field(
        default_factory=Certify, description="Whether a run demands certificates of its rows."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_columns(self.columns, self.prompt_template)
        if (self.source is None) == (not self.sources):
            found = "neither" if self.source is None else "both"
            raise contradiction(f"set one of source and sources (a list of several); found {found}")
        if not self.sources:
            return self
        for name, given in (("columns", self.columns), ("promptTemplate", self.prompt_template)):
            if given:
                raise contradiction("is for a single source; with sources it belongs to each of them", name)
        reject_duplicates([part.name for part in self.sources], "sources", "name")
        unweighted = [number for number, part in enumerate(self.sources) if part.weight is None]
        if unweighted and len(unweighted) < len(self.sources):
            raise contradiction(
                "is missing, and other sources have one; give all sources a weight, or none",
                *("sources", unweighted[0], "weight"),
            )
        return self

    def located_sources(self) -> list[tuple[Path, DatasetSource]]:
        """All sources, each with its path in the manifest."""
        if self.source is not None:
            return [(("spec", "dataset", "source"), self.source)]
        return [
            (("spec", "dataset", "sources", number, "source"), part.source) for number, part in enumerate(self.sources)
        ]
