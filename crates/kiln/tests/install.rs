//! The first words of the program, the check for newer releases, and the script that installs one: by a folder and by a server of this
//! machine. Nothing else is asked.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

fn kiln(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kiln")).args(words).env_remove("KILN_UPDATES").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn without_a_command_three_are_named_that_there_are() {
    let greeting = kiln(&[]);
    let said = text(&greeting.stdout);
    assert!(greeting.status.success() && greeting.stderr.is_empty());
    assert!(said.starts_with(&format!("Kiln {}", env!("CARGO_PKG_VERSION"))), "{said}");
    let help = text(&kiln(&["--help"]).stdout);
    let named: Vec<&str> =
        said.lines().filter_map(|line| line.strip_prefix("  kiln ")?.split_whitespace().next()).collect();
    assert_eq!(named, ["run", "chat", "serve"]);
    for command in named {
        assert!(help.contains(&format!("\n  {command} ")), "{command} is none of {help}");
    }
}

/// Answers every request with this text, and tells the path of each; the address.
fn server(path: &'static str, body: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let mut lines = BufReader::new(connection.try_clone().unwrap()).lines().map_while(Result::ok);
            let first = lines.next().unwrap_or_default();
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            let (status, body) = match first.starts_with(&format!("GET {path} ")) {
                true => ("200 OK", body.as_str()),
                false => ("404 Not Found", ""),
            };
            let length = body.len();
            let _ =
                write!(connection, "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
        }
    });
    format!("http://{address}")
}

#[test]
fn a_newer_release_is_told_and_nothing_is_asked_without_an_address() {
    let sums = |version: &str| format!("{:064}  kiln-{version}-x86_64-linux.tar.xz\n", 0);
    let newer = server("/kiln/SHA256SUMS", sums("99.1.2"));
    let told = kiln(&["update", "--check", "--from", &format!("{newer}/kiln/"), "--json"]);
    assert!(told.status.success(), "{}", text(&told.stderr));
    let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!((&told["latest"], &told["newer"]), (&"99.1.2".into(), &true.into()), "{told}");
    assert_eq!(told["current"], env!("CARGO_PKG_VERSION"));

    let page =
        server("/simple/kiln-llm/", format!("<a href=x>kiln_llm-{}-py3-none-any.whl</a>", env!("CARGO_PKG_VERSION")));
    let told = kiln(&["update", "--check", "--from", &format!("{page}/simple/kiln-llm")]);
    assert!(told.status.success() && text(&told.stdout).contains("is the newest release"), "{told:?}");

    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("SHA256SUMS"), sums("99.0.0")).unwrap();
    let told = kiln(&["update", "--check", "--from", folder.path().to_str().unwrap()]);
    assert!(text(&told.stdout).starts_with("Kiln 99.0.0 is there"), "{told:?}");

    for (words, why) in [
        (&["update", "--check"][..], "no address of releases is known"),
        (&["update"], "does not replace itself"),
        (&["update", "--check", "--from", &newer], "404"),
        (&["update", "--check", "--from", "/no/such/folder"], "cannot read /no/such/folder/SHA256SUMS"),
    ] {
        let failed = kiln(words);
        assert!(failed.status.code() == Some(1) && text(&failed.stderr).contains(why), "{words:?}: {failed:?}");
        assert!(failed.stdout.is_empty());
    }
}

/// A release whose program is a script: the archive, and the checksum that is said of it.
fn release(folder: &Path, sum: Option<&str>) {
    let script = "set -e
        machine=$(uname -m); top=kiln-1.2.3-$machine-linux
        mkdir -p \"$top/bin\" \"$top/share/man/man1\"
        printf '#!/bin/sh\\necho kiln 1.2.3\\n' > \"$top/bin/kiln\"
        chmod 755 \"$top/bin/kiln\"
        echo page > \"$top/share/man/man1/kiln.1\"
        tar -cJf \"$top.tar.xz\" \"$top\"
        rm -r \"$top\"
        sha256sum \"$top.tar.xz\" > SHA256SUMS";
    let made = Command::new("sh").args(["-c", script]).current_dir(folder).output().unwrap();
    assert!(made.status.success(), "{}", text(&made.stderr));
    if let Some(sum) = sum {
        let sums = fs::read_to_string(folder.join("SHA256SUMS")).unwrap();
        fs::write(folder.join("SHA256SUMS"), format!("{sum}{}", &sums[64..])).unwrap();
    }
}

fn install(words: &[&Path], sum: &str) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/install.sh");
    let [from, prefix] = words else { panic!("two folders") };
    let mut command = Command::new("sh");
    command.arg(script).args([from.as_os_str(), "--prefix".as_ref(), prefix.as_os_str()]);
    command.env("KILN_SHA256", sum).output().unwrap()
}

fn is_empty(folder: &Path) -> bool {
    !folder.exists() || fs::read_dir(folder).unwrap().next().is_none()
}

#[test]
fn an_archive_with_another_checksum_is_not_installed() {
    let folder = tempfile::tempdir().unwrap();
    let [good, bad, prefix] = ["good", "bad", "prefix"].map(|name| folder.path().join(name));
    fs::create_dir(&good).unwrap();
    fs::create_dir(&bad).unwrap();
    let other = "0".repeat(64);
    release(&good, None);
    release(&bad, Some(&other));
    for (from, sum) in [(&bad, ""), (&good, other.as_str())] {
        let refused = install(&[from, &prefix], sum);
        let said = text(&refused.stderr);
        assert!(refused.status.code() == Some(1) && said.contains("Nothing was installed"), "{refused:?}");
        assert!(said.contains(&other) && is_empty(&prefix), "{said}");
    }
    let right = fs::read_to_string(good.join("SHA256SUMS")).unwrap()[..64].to_owned();
    let done = install(&[&good, &prefix], &right);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let told = Command::new(prefix.join("bin/kiln")).output().unwrap();
    assert_eq!(text(&told.stdout), "kiln 1.2.3\n");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/install.sh");
    let removed = Command::new("sh").arg(script).args(["--remove", "--prefix"]).arg(&prefix).output().unwrap();
    assert!(removed.status.success() && is_empty(&prefix), "{}", text(&removed.stderr));
}
