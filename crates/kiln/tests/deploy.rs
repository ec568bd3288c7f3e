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

fn help_of(command: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kiln")).args([command, "--help"]).output().expect("kiln runs");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn flags_in(text: &str) -> Vec<&str> {
    text.split([' ', ',', '[', ']', '"', '\n']).filter(|word| word.starts_with("--")).collect()
}

/// A group of hosts starts a leader and a stage: each with flags of its own command.
#[test]
fn a_group_of_hosts_uses_flags_that_there_are() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/leader-worker-set.yaml");
    let text = std::fs::read_to_string(file).expect("a file of deploy");
    let leader = text.split_once("exec kiln serve").expect("a leader").1.split_once("env:").expect("its end").0;
    let stage = text.split_once("args: [stage").expect("a stage").1.split_once(']').expect("its end").0;
    for (command, flags, least) in [("serve", flags_in(leader), 10), ("stage", flags_in(stage), 4)] {
        let help = help_of(command);
        assert!(flags.len() >= least, "{flags:?}");
        for flag in flags {
            assert!(
                help.contains(&format!("{flag} ")) || help.contains(&format!("{flag}\n")),
                "`kiln {command}` has no {flag}"
            );
        }
    }
    let port = number_after(&text, "0.0.0.0:91");
    assert!(
        text.contains(&format!("containerPort: 91{port:02}")) && text.contains(&format!("cluster.local:91{port:02}"))
    );
}

/// Ray is not here, but Python is: the file can be read, and starts Kiln with flags that there are.
#[test]
fn the_deployment_for_ray_can_be_read() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/ray/kiln_ray.py");
    let script = "import ast, sys; ast.parse(open(sys.argv[1], encoding='utf-8').read())";
    let output = Command::new("python3").args(["-c", script]).arg(&file).output().expect("python3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(file).expect("a file of deploy");
    let command = text.lines().find(|line| line.contains("command = [kiln, \"serve\"")).expect("how Kiln is started");
    let (help, flags) = (help_of("serve"), flags_in(command));
    assert_eq!(flags.len(), 3, "{flags:?}");
    flags
        .iter()
        .for_each(|flag| assert!(help.contains(&format!("{flag} ")) || help.contains(&format!("{flag}\n")), "{flag}"));
}

/// What a bench measures is what the simulation reads.
#[test]
fn a_measured_curve_is_simulated() {
    let folder = tempfile::tempdir().expect("a folder");
    let kiln = |words: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kiln")).args(words).current_dir(folder.path()).output();
        output.expect("kiln runs")
    };
    assert!(kiln(&["synth", "tiny-llama", "F32", "m.gguf"]).status.success());
    let bench =
        ["bench", "m.gguf", "--cpu", "-p", "64", "-n", "16", "-r", "1", "--sequences", "1,2", "--curve", "mine.json"];
    let measured = kiln(&bench);
    assert!(measured.status.success(), "{}", String::from_utf8_lossy(&measured.stderr));
    let text = std::fs::read_to_string(folder.path().join("mine.json")).expect("a curve");
    let curve: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let step = |width: &str| curve["step_ms"][width].as_f64().expect("a time");
    assert!(step("1") > 0.0 && step("2") > 0.0 && curve["prefill"].as_f64().expect("a rate") > 0.0, "{text}");
    assert_eq!((&curve["slots"], curve["cache_tokens"].as_u64().map(|n| n % 64)), (&2.into(), Some(0)), "{text}");
    let again = kiln(&bench);
    assert!(String::from_utf8_lossy(&again.stderr).contains("--force"), "nothing is overwritten unless told");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/simulate.py");
    let mut simulate = Command::new("python3");
    simulate.arg(script).args(["--curve", "mine.json", "--work", "chat", "--replicas", "1,2", "--seconds", "20"]);
    let output =
        simulate.args(["--policy", "prefix", "--most", "500"]).current_dir(folder.path()).output().expect("python3");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.lines().filter(|line| line.contains("| prefix |")).count() == 2, "{said}");
}
