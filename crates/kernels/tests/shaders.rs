//! Compiles every shader variant that any case picks on any kind of device, and validates the SPIR-V where the
//! validator is at hand (`KILN_SPIRV_VAL`, set by `scripts/software-gpu`).

use std::collections::HashMap;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_gpu::{Caps, IntDot, Shader, Sources, compile_offline};
use kiln_kernels::case::Level;
use kiln_kernels::operation::Path;
use kiln_kernels::{KERNELS, SOURCES};
use rayon::prelude::*;

/// Devices that between them reach every branch of every `pick`.
fn devices() -> Vec<Caps> {
    let nvidia = Caps::example_nvidia();
    let mut plain = nvidia.clone();
    plain.coopmat.clear();
    plain.coopmat2 = Default::default();
    let mut software = plain.clone();
    software.is_cpu = true;
    software.subgroups.size = 8;
    software.int_dot = IntDot::Emulated;
    vec![nvidia, plain, software, Caps::least()]
}

/// Whether a module uses bfloat16 (SPV_KHR_bfloat16), which validators of before mid 2025 refuse to read.
fn uses_bfloat16(module: &[u32]) -> bool {
    const OP_CAPABILITY: u32 = 17;
    const BFLOAT16_TYPE_DOT_PRODUCT_COOPERATIVE_MATRIX: std::ops::RangeInclusive<u32> = 5116..=5118;
    module.windows(2).skip(5).any(|words| {
        words[0] == (2 << 16 | OP_CAPABILITY) && BFLOAT16_TYPE_DOT_PRODUCT_COOPERATIVE_MATRIX.contains(&words[1])
    })
}

#[test]
fn every_variant_compiles_and_is_valid() {
    let mut variants: HashMap<Shader, String> = HashMap::new();
    let devices = devices();
    // Data of full and bench cases takes minutes to make, and their variants differ in sizes only.
    for case in KERNELS.iter().flat_map(|kernel| (kernel.cases)(Level::Small)) {
        let (call, _, _) = case.build();
        for (caps, path) in devices.iter().flat_map(|caps| Path::ALL.map(|path| (caps, path))) {
            let Ok(choice) = call.operation().pick(caps, Some(path)) else { continue };
            for launch in choice.launches {
                variants.entry(launch.shader).or_insert_with(|| case.name.clone());
            }
        }
    }
    // Of each file one kernel that waits for those before it by itself: how it does so is the same for all.
    let mut waiting: Vec<(Shader, String)> = Vec::new();
    let mut sorted: Vec<(&Shader, &String)> = variants.iter().collect();
    sorted.sort_by_key(|(shader, case)| (shader.file, *case));
    for (shader, case) in sorted {
        if waiting.last().is_none_or(|(last, _)| last.file != shader.file) {
            waiting.push((shader.clone().launching_dependent(), format!("{case}, dependent launch")));
        }
    }
    variants.extend(waiting);
    let sources = Sources::new(SOURCES);
    let validator = std::env::var("KILN_SPIRV_VAL").ok();
    let folder = std::env::temp_dir().join(format!("kiln-spirv-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let validated = AtomicUsize::new(0);
    let check = |number: usize, shader: &Shader| -> Result<(), String> {
        let module = compile_offline(&sources, shader).map_err(|e| e.to_string())?;
        let Some(validator) = validator.as_ref().filter(|_| !uses_bfloat16(&module)) else { return Ok(()) };
        validated.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("{number}.spv"));
        let bytes: Vec<u8> = module.iter().flat_map(|w| w.to_le_bytes()).collect();
        std::fs::write(&path, bytes).unwrap();
        let out = Command::new(validator).args(["--target-env", "vulkan1.3"]).arg(&path).output().unwrap();
        std::fs::remove_file(&path).unwrap();
        if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) }
    };
    let failures: Vec<String> = Vec::from_iter(&variants)
        .par_iter()
        .enumerate()
        .filter_map(|(number, (shader, case))| {
            Some(format!("{case}: {}: {}", shader.name, check(number, shader).err()?))
        })
        .collect();
    std::fs::remove_dir_all(folder).unwrap();
    println!("{} shader variants, {} of them validated", variants.len(), validated.into_inner());
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), variants.len(), failures.join("\n"));
    assert!(!variants.is_empty());
}
