//! The files of `deploy` say what the program knows: every flag of `kiln serve` in them is one, and pods end after their answers.

use std::path::Path;
use std::process::Command;

#[test]
fn deployment_files_use_flags_that_there_are() {
    let output = Command::new(env!("CARGO_BIN_EXE_kiln")).args(["serve", "--help"]).output().expect("kiln runs");
    let help = String::from_utf8(output.stdout).expect("UTF-8");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let mut seen = 0;
    let names = ["kiln.service", "Dockerfile", "compose.yaml", "kubernetes.yaml", "gateways/haproxy.cfg"];
    for name in names.into_iter().chain(["gateways/nginx.conf", "gateways/envoy.yaml", "gateways/smg.sh"]) {
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

/// Flags of the chart stand one by one, on lines of a list.
#[test]
fn the_chart_uses_flags_that_there_are() {
    let output = Command::new(env!("CARGO_BIN_EXE_kiln")).args(["serve", "--help"]).output().expect("kiln runs");
    let help = String::from_utf8(output.stdout).expect("UTF-8");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/helm/kiln/templates/deployment.yaml");
    let chart = std::fs::read_to_string(file).expect("a file of deploy");
    let flags: Vec<&str> =
        chart.lines().filter_map(|line| line.trim().strip_prefix("- --")?.split('=').next()).collect();
    assert!(flags.len() >= 8, "{flags:?}");
    for flag in flags {
        let stands = |end| help.contains(&format!("--{flag}{end}"));
        assert!(stands(" ") || stands("\n"), "`kiln serve` has no --{flag}");
    }
}

/// What the simulation of many servers says of cases that can be computed by hand.
#[test]
fn the_simulation_holds_what_can_be_computed() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/simulate.py");
    let output = Command::new("python3").arg(script).arg("--check").output().expect("python3");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.starts_with("checked"), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The number behind some words of a text.
fn number_after(text: &str, words: &str) -> u64 {
    let rest = text.split_once(words).unwrap_or_else(|| panic!("there is no {words}")).1;
    let digits: String = rest.chars().skip_while(|c| " \"[,".contains(*c)).take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("no number follows {words}"))
}

/// A pod that is told to end refuses requests at once, so it waits until no endpoint leads to it, and is not killed before its answers end.
#[test]
fn pods_wait_for_their_endpoints_and_finish_their_answers() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes.yaml");
    let text = std::fs::read_to_string(file).expect("a file of deploy");
    let sleep = number_after(&text, "preStop: {exec: {command: [sleep, ");
    let drain = number_after(&text, "--drain, ");
    let grace = number_after(&text, "terminationGracePeriodSeconds: ");
    assert!(sleep >= 5, "{sleep} s are too few for endpoints to follow");
    assert!(grace > sleep + drain, "{sleep} s and {drain} s are more than the {grace} s that a pod has");
    for image in text.lines().filter_map(|line| line.trim().strip_prefix("image: ")) {
        assert!(image.contains(':') && !image.ends_with(":latest"), "{image} is another one tomorrow");
    }
}
