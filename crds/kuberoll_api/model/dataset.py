"""The prompts: source of the rows, limits and repeats."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from kuberoll_api.model.contradictions import contradiction
from kuberoll_api.model.traits import IDENTITY, OPERATION
from kuberoll_api.model.types import (
    MAX_COUNT,
    MAX_SEED,
    DnsLabel,
    JsonObject,
    LongText,
    Model,
    Name,
)


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


class Dataset(Model):
    """The prompts, and the number of samples of each."""

    source: Annotated[DatasetSource, OPERATION] = Field(description="Source of the rows.")
    limit: Annotated[int | None, IDENTITY] = Field(
        default=None, ge=1, le=MAX_COUNT, description="Use only the first rows; absent: all."
    )
    repeats: Annotated[int, IDENTITY] = Field(
        default=1, ge=1, le=65536, description="Samples per prompt: the size of a prompt group."
    )
    seed_per_repeat: Annotated[bool, IDENTITY] = Field(
        default=True,
        description="Give every trajectory its own sampling seed, so that a run is reproducible; false: random.",
    )
    prompt_template: Annotated[PromptTemplate | None, IDENTITY] = Field(
        default=None, description="Template of the prompt for rows that have neither `messages` nor `prompt`."
    )
