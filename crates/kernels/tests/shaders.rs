//! Compiles every shader variant that any case picks on any kind of device, and validates the SPIR-V where the
//! validator is at hand (`KILN_SPIRV_VAL`, set by `scripts/software-gpu`).

use std::collections::HashMap;
use std::process::Command;

use kiln_gpu::{Caps, IntDot, Shader, Sources, compile_offline};
use kiln_kernels::case::Level;
use kiln_kernels::operation::Path;
use kiln_kernels::{KERNELS, SOURCES};

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

#[test]
fn every_variant_compiles_and_is_valid() {
    let mut variants: HashMap<Shader, String> = HashMap::new();
    let devices = devices();
    for kernel in KERNELS {
        for level in [Level::Small, Level::Bench] {
            for case in (kernel.cases)(level) {
                let (call, _, _) = case.build();
                for caps in &devices {
                    for path in Path::ALL {
                        let Ok(choice) = call.operation().pick(caps, Some(path)) else { continue };
                        for launch in choice.launches {
                            variants.entry(launch.shader).or_insert_with(|| case.name.clone());
                        }
                    }
                }
            }
        }
    }
    let sources = Sources::new(SOURCES);
    let validator = std::env::var("KILN_SPIRV_VAL").ok();
    let folder = std::env::temp_dir().join(format!("kiln-spirv-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut failures = Vec::new();
    for (number, (shader, case)) in variants.iter().enumerate() {
        let module = match compile_offline(&sources, shader) {
            Ok(module) => module,
            Err(e) => {
                failures.push(format!("{case}: {e}"));
                continue;
            }
        };
        let path = folder.join(format!("{number}.spv"));
        let bytes: Vec<u8> = module.iter().flat_map(|w| w.to_le_bytes()).collect();
        std::fs::write(&path, bytes).unwrap();
        if let Some(validator) = &validator {
            let out = Command::new(validator).args(["--target-env", "vulkan1.3"]).arg(&path).output().unwrap();
            if !out.status.success() {
                failures.push(format!("{case}: {}: {}", shader.name, String::from_utf8_lossy(&out.stderr)));
            }
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
    println!("{} shader variants, validated: {}", variants.len(), validator.is_some());
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), variants.len(), failures.join("\n"));
    assert!(!variants.is_empty());
}
