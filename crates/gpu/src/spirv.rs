//! Reads what a SPIR-V module asks of the device: the bytes of shared memory it declares. Drivers do not refuse a
//! module that asks for too much, they lose the device, so Kiln counts before it makes a pipeline.

use std::collections::HashMap;

const OP_TYPE_BOOL: u32 = 20;
const OP_TYPE_INT: u32 = 21;
const OP_TYPE_FLOAT: u32 = 22;
const OP_TYPE_VECTOR: u32 = 23;
const OP_TYPE_MATRIX: u32 = 24;
const OP_TYPE_ARRAY: u32 = 28;
const OP_TYPE_STRUCT: u32 = 30;
const OP_TYPE_POINTER: u32 = 32;
const OP_CONSTANT: u32 = 43;
const OP_VARIABLE: u32 = 59;
const STORAGE_WORKGROUP: u32 = 4;

/// Bytes of shared memory declared by a module.
pub(crate) fn shared_bytes(module: &[u32]) -> u64 {
    let mut size: HashMap<u32, u64> = HashMap::new();
    let mut constant: HashMap<u32, u64> = HashMap::new();
    let mut pointee: HashMap<u32, u32> = HashMap::new();
    let mut total = 0;
    for words in instructions(module) {
        let known = |id: u32| size.get(&id).copied().unwrap_or(0);
        match (words[0] & 0xffff, words) {
            (OP_TYPE_BOOL, [_, id, ..]) => drop(size.insert(*id, 4)),
            (OP_TYPE_INT | OP_TYPE_FLOAT, [_, id, bits, ..]) => drop(size.insert(*id, u64::from(bits / 8))),
            (OP_TYPE_VECTOR | OP_TYPE_MATRIX, [_, id, of, n, ..]) => drop(size.insert(*id, known(*of) * u64::from(*n))),
            (OP_CONSTANT, [_, _, id, value, ..]) => drop(constant.insert(*id, u64::from(*value))),
            (OP_TYPE_ARRAY, [_, id, of, n, ..]) => {
                let bytes = known(*of) * constant.get(n).copied().unwrap_or(0);
                size.insert(*id, bytes);
            }
            (OP_TYPE_STRUCT, [_, id, members @ ..]) => {
                let bytes = members.iter().map(|m| known(*m)).sum();
                size.insert(*id, bytes);
            }
            (OP_TYPE_POINTER, [_, id, STORAGE_WORKGROUP, of, ..]) => drop(pointee.insert(*id, *of)),
            (OP_VARIABLE, [_, ty, _, STORAGE_WORKGROUP, ..]) => {
                total += pointee.get(ty).map_or(0, |of| known(*of));
            }
            _ => {}
        }
    }
    total
}

fn instructions(module: &[u32]) -> impl Iterator<Item = &[u32]> {
    let mut rest = module.get(5..).unwrap_or(&[]);
    std::iter::from_fn(move || {
        let count = (*rest.first()? >> 16).max(1) as usize;
        let (words, after) = rest.split_at_checked(count)?;
        rest = after;
        Some(words)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Shader, Sources, compile_offline};

    #[test]
    fn shared_arrays_vectors_and_structs_are_counted() {
        const FILES: &[(&str, &str)] = &[(
            "s.comp",
            "layout(local_size_x = 1) in;\nstruct S { float a; uvec2 b[3]; };\n\
             shared float x[100];\nshared vec4 y[8];\nshared S s[2];\n\
             void main() { x[0] = y[1].x; s[1].a = x[1]; }\n",
        )];
        let shader = Shader::new("s", "s.comp", String::new());
        let module = compile_offline(&Sources::with_folder(FILES, None), &shader).unwrap();
        assert_eq!(shared_bytes(&module), 400 + 128 + 2 * 28);
    }
}
