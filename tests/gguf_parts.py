"""A GGUF file in parts, by the package that defines the format, as llama-gguf-split writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def split(path: Path, part_of: Callable[[str], int]) -> list[Path]:
    """Write the file's metadata, and those of its tensors that are of part 0, to the first of several files beside it,
    and the other tensors to the others; the last part must have one."""
    reader = GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    architecture = fields.pop("general.architecture").contents()
    writer = GGUFWriter(path, architecture)
    for name, field in fields.items():
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in sorted(reader.tensors, key=lambda tensor: part_of(tensor.name)):
        while len(writer.tensors) <= part_of(tensor.name):
            writer.tensors.append({})
        writer.add_tensor(tensor.name, tensor.data.copy(), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    count = len(writer.tensors)
    return [path.with_name(f"{path.stem}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
