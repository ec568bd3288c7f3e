//! The files of `deploy` say what the program knows: every flag of `kiln serve` in them is one.

use std::path::Path;
use std::process::Command;

#[test]
fn deployment_files_use_flags_that_there_are() {
    let output = Command::new(env!("CARGO_BIN_EXE_kiln")).args(["serve", "--help"]).output().expect("kiln runs");
    let help = String::from_utf8(output.stdout).expect("UTF-8");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let mut seen = 0;
    for name in ["kiln.service", "Dockerfile", "compose.yaml", "kubernetes.yaml"] {
        let text = std::fs::read_to_string(folder.join(name)).expect("a file of deploy");
        let lines = text.lines().filter_map(|line| line.split_once("serve")).filter(|(_, rest)| rest.contains("gguf"));
        for (_, flags) in lines {
            for flag in flags.split([' ', ',', '[', ']']).filter(|word| word.starts_with("--")) {
                assert!(help.contains(&format!("{flag} ")), "{name}: `kiln serve` has no {flag}");
                seen += 1;
            }
        }
    }
    assert!(seen >= 12, "only {seen} flags were found");
}
