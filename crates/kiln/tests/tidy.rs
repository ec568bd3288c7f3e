//! Keeps the house in the shape that ARCHITECTURE.md describes: which crate may use which, how long files may be, what
//! every kernel folder holds, where unsafe code may live. Each check is a pure function from text to problems; the
//! tests run it over the repository and, below, over bad input. How code is written is left to rustfmt and clippy.

#[path = "tidy/code.rs"]
mod code;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use code::code_only;

/// Crate folders with their level: a crate may use only crates of lower levels.
const LEVELS: [(&str, u32); 16] = [
    ("system", 0),
    ("gguf", 1),
    ("gpu", 1),
    ("media", 1),
    ("tools", 1),
    ("convert", 2),
    ("kernels", 2),
    ("store", 2),
    ("engine", 3),
    ("llm", 4),
    ("stage", 4),
    ("capi", 5),
    ("python", 5),
    ("server", 5),
    ("kiln", 6),
    // Makes packages of the binary, and uses none of the crates.
    ("xtask", 0),
];
/// Raising a budget is a commit of its own, with a reason.
const BUDGETS: [(&str, usize); 3] = [("rs", 800), ("comp", 500), ("glsl", 500)];
/// Names that say nothing about what a file holds.
const EMPTY_NAMES: [&str; 5] = ["utils", "common", "base", "helpers", "misc"];
/// What every kernel folder holds beside its shader.
const ROOM: [&str; 3] = ["mod.rs", "reference.rs", "cases.rs"];
/// Words without a meaning of their own in inference code, or with a better one in the field, and what to write instead. No crate uses the
/// first ones; the second ones are gone from the crates in `PLAIN_CRATES`. They are found in names, comments and messages.
const RETIRED_NAMES: [(&str, &str); 6] = [
    ("woven", "interleaved"),
    ("weave", "interleave"),
    ("loom", "repacker"),
    ("shelf", "model registry"),
    ("lingering", "half-close"),
    ("readies", "pack_b"),
];
const RETIRED_WORDS: [(&str, &str); 10] = [
    ("alike", "batch-invariant, or the same"),
    ("whoever", "the actor's name"),
    ("nobody", "the actor's name"),
    ("so many", "this many, or the parameter's name"),
    ("in the place of", "instead of"),
    ("in the place where", "where"),
    ("goes on", "continues"),
    ("hand over", "dependent launch"),
    ("hands over", "dependent launch"),
    ("handing over", "dependent launch"),
];
/// Crates without the second kind. A crate joins when it is done; none leaves.
const PLAIN_CRATES: [&str; 6] = ["system", "gguf", "gpu", "convert", "kernels", "store"];
/// Public types that share their name with another one of the crate. The list only shrinks: `Call` alone stays, one for each operation.
const SAME_NAMES: [(&str, &[&str]); 2] = [
    ("kernels", &["Call", "Found", "Gate", "Gated", "Mix", "Norm", "Subject", "Trial"]),
    ("engine", &["Constraint", "Event", "Family", "Place", "Rule", "Sizes", "Step", "Streams", "Weights"]),
];
/// A word in backticks that starts like this, or ends in one of `PATH_ENDS` and has a slash, is a path.
const PATH_STARTS: [&str; 7] = ["crates/", "scripts/", "docs/", "tests/", "fuzz/", "deploy/", ".ci/"];
const PATH_ENDS: [&str; 7] = [".rs", ".comp", ".glsl", ".md", ".toml", ".py", ".json"];

// --- the checks -----------------------------------------------------------------------------------------------------

/// Uses of crates that are not below `folder` in `LEVELS`, by the text of its Cargo.toml.
fn wrong_dependencies(folder: &str, manifest: &str) -> Vec<String> {
    let Some(&(_, level)) = LEVELS.iter().find(|(name, _)| *name == folder) else {
        return vec![format!("crates/{folder}/Cargo.toml:1: the crate is not in LEVELS of the tidy test")];
    };
    let mut problems = Vec::new();
    let mut in_dependencies = false;
    for (number, line) in numbered(manifest) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.starts_with('[') {
            // `[dependencies]`, `[dev-dependencies]`, `[target.'cfg(unix)'.dependencies]`, `[dependencies.kiln-gpu]`.
            in_dependencies = line.contains("dependencies");
        }
        for (used, used_level) in LEVELS {
            if in_dependencies && names_crate(line, used) && used_level >= level {
                problems.push(format!(
                    "crates/{folder}/Cargo.toml:{number}: {folder} may not use {used}; \
                     the arrows are system <- gguf, gpu, media, tools <- kernels, convert, store <- engine <- llm, stage <- server, capi <- kiln"
                ));
            }
        }
    }
    problems
}

/// Whether a line of a dependency table means the crate in this folder, by key, package name or path.
fn names_crate(line: &str, folder: &str) -> bool {
    let package = if folder == "kiln" { "kiln".to_owned() } else { format!("kiln-{folder}") };
    let key = line.split(['=', ' ', '.']).next().unwrap_or_default().trim_matches('"');
    let table = line.trim_matches(['[', ']']).rsplit('.').next().unwrap_or_default();
    key == package
        || (line.starts_with('[') && table == package)
        || line.contains(&format!("\"{package}\""))
        || line.contains(&format!("/{folder}\""))
}

/// Paths in backticks, outside fenced blocks, that `exists` does not know.
fn missing_paths(file: &str, markdown: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut problems = Vec::new();
    let mut fenced = false;
    for (number, line) in numbered(markdown) {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        for word in line.split('`').skip(1).step_by(2).flat_map(str::split_whitespace) {
            let path = word.trim_end_matches(['/', ',', ';', ':']).split('#').next().unwrap_or_default();
            if looks_like_path(path) && !exists(fixed_part(path)) {
                problems.push(format!("{file}:{number}: `{word}` does not exist"));
            }
        }
    }
    problems
}

fn looks_like_path(word: &str) -> bool {
    let foreign = word.starts_with(['/', '~', '$', '<']) || word.contains("://");
    let ends_so = word.contains('/') && PATH_ENDS.iter().any(|end| word.ends_with(end));
    !foreign && (ends_so || PATH_STARTS.iter().any(|start| word.starts_with(start)))
}

/// The folders before the first placeholder: `crates/kernels/src` of `crates/kernels/src/<op>/mod.rs`.
fn fixed_part(path: &str) -> &str {
    match path.find(['*', '<', '{', '…']) {
        Some(at) => path[..at].rsplit_once('/').map_or("", |(folders, _)| folders),
        None => path,
    }
}

/// A file longer than its budget.
fn too_long(file: &str, text: &str) -> Vec<String> {
    let lines = text.lines().count();
    let budget = BUDGETS.iter().find(|(extension, _)| Some(*extension) == extension_of(file));
    budget
        .filter(|(_, most)| lines > *most)
        .map(|(_, most)| format!("{file}:{}: {lines} lines, at most {most} are allowed; split it", most + 1))
        .into_iter()
        .collect()
}

/// A file or folder whose name says nothing.
fn empty_name(file: &str) -> Vec<String> {
    let part = file.split('/').find(|part| EMPTY_NAMES.contains(&part.split('.').next().unwrap_or_default()));
    part.map(|part| format!("{file}:1: the name `{part}` says nothing; name it after what it holds"))
        .into_iter()
        .collect()
}

/// A Rust file that does not open by saying what lives in it.
fn no_heading(file: &str, text: &str) -> Vec<String> {
    if text.starts_with("//! ") {
        return Vec::new();
    }
    vec![format!("{file}:1: the file should begin with `//!` and say what lives here and what does not")]
}

/// Words that may not occur in this Rust file; comments and literals do not count.
fn forbidden_words(file: &str, text: &str) -> Vec<String> {
    let unsafe_files = [
        "crates/gguf/src/map.rs",
        "crates/system/src/instructions.rs",
        "crates/system/src/allocator.rs",
        "crates/system/src/code.rs",
    ];
    let unsafe_folders = ["crates/gpu/", "crates/capi/", "crates/system/src/os/"];
    let unsafe_allowed = unsafe_folders.iter().any(|folder| file.starts_with(folder)) || unsafe_files.contains(&file);
    let mut problems = Vec::new();
    for (number, line) in numbered(&code_only(text)) {
        let words = words(line);
        let mut forbid = |found: bool, what: &str| {
            if found {
                problems.push(format!("{file}:{number}: {what}"));
            }
        };
        forbid(
            words.contains("unsafe") && !unsafe_allowed,
            "`unsafe` belongs in crates/gpu, crates/capi, crates/gguf/src/map.rs or crates/system/src/{instructions,allocator,code,os}",
        );
        forbid(words.contains("todo") && line.contains("todo!"), "`todo!` is not finished work");
        forbid(
            words.contains("unimplemented") && line.contains("unimplemented!"),
            "`unimplemented!` is not finished work",
        );
        forbid(
            line.replace(' ', "").contains("#[ignore"),
            "a test that is ignored proves nothing; make it run or remove it",
        );
    }
    problems
}

/// Places outside `crates/system` that ask which operating system they are built for. Tests do not count: they run where the project is
/// developed.
fn systems_told_apart(file: &str, text: &str) -> Vec<String> {
    let asks = [
        "target_os",
        "target_family",
        "target_vendor",
        "cfg(unix",
        "cfg(windows",
        "os::unix::",
        "os::windows::",
        "os::fd::",
        "libc::",
        "rustix::",
    ];
    if !file.starts_with("crates/")
        || file.starts_with("crates/system/")
        || file.contains("/tests/")
        || file.ends_with("/tests.rs")
    {
        return Vec::new();
    }
    let code = code_only(text);
    let tested = code.find("#[cfg(test)]").unwrap_or(code.len());
    let found = numbered(&code[..tested]).filter(|(_, line)| asks.iter().any(|ask| line.contains(ask)));
    found
        .map(|(number, _)| format!("{file}:{number}: operating systems are told apart in crates/system/src/os alone"))
        .collect()
}

/// Kernel folders (those with a shader) that lack a file or are not named in the crate's lib.rs.
fn incomplete_rooms(files: &[String], lib: &str) -> Vec<String> {
    let lib = code_only(lib);
    let rows: BTreeSet<&str> =
        lib.lines().filter_map(|line| line.split_once("=>")).map(|(name, _)| name.trim()).collect();
    let folders: BTreeSet<&str> = files
        .iter()
        .filter(|file| file.starts_with("crates/kernels/src/") && file.ends_with(".comp"))
        .filter_map(|file| file.rsplit_once('/').map(|(folder, _)| folder))
        .collect();
    let mut problems = Vec::new();
    for folder in folders {
        for needed in ROOM {
            if !files.contains(&format!("{folder}/{needed}")) {
                problems.push(format!("{folder}/{needed}:1: missing; every folder with a .comp file has one"));
            }
        }
        let name = folder.rsplit('/').next().unwrap_or_default();
        if !rows.contains(name) {
            problems.push(format!("crates/kernels/src/lib.rs:1: the kernel `{name}` is not registered"));
        }
    }
    problems
}

/// Rust files of crates that rustfmt does not reach: it follows `mod` declarations from the roots of targets, and does not look into macros.
fn unformatted(files: &[String], read: impl Fn(&str) -> String) -> Vec<String> {
    let of_crates: BTreeSet<&str> =
        files.iter().map(String::as_str).filter(|file| file.starts_with("crates/") && file.ends_with(".rs")).collect();
    let mut reached = BTreeSet::new();
    let mut next: Vec<String> = of_crates.iter().filter(|file| is_root(file)).map(|&file| file.to_owned()).collect();
    while let Some(file) = next.pop() {
        if !of_crates.contains(file.as_str()) || reached.contains(&file) {
            continue;
        }
        next.extend(declared_files(&file, &read(&file)));
        reached.insert(file);
    }
    let missed = of_crates.into_iter().filter(|file| !reached.contains(*file));
    missed.map(|file| format!("{file}:1: rustfmt does not see it; declare it with a plain `mod` line")).collect()
}

/// Whether cargo builds a target from this file.
fn is_root(file: &str) -> bool {
    matches!(
        file.split('/').skip(2).collect::<Vec<_>>()[..],
        ["build.rs"] | ["src", "lib.rs" | "main.rs"] | ["src", "bin", _] | ["tests" | "benches" | "examples", _]
    )
}

/// The files that this one may declare as modules, outside macros.
fn declared_files(file: &str, text: &str) -> Vec<String> {
    let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
    let modules = if is_root(file) || file.ends_with("/mod.rs") { folder } else { file.trim_end_matches(".rs") };
    let code = outside_macros(&code_only(text));
    let declared = code.split(';').filter_map(|item| {
        let mut words = item.split_whitespace().rev();
        let name = words.next()?;
        (words.next()? == "mod").then_some(name)
    });
    let mut found: Vec<String> =
        declared.flat_map(|name| [format!("{modules}/{name}.rs"), format!("{modules}/{name}/mod.rs")]).collect();
    let attributes = text.lines().map(str::trim).filter(|line| line.starts_with("#["));
    let paths = attributes.filter_map(|line| line.split_once("path = \"")?.1.split_once('"'));
    found.extend(paths.map(|(path, _)| joined(folder, path)));
    found
}

/// A relative path from a folder, without `..`.
fn joined(folder: &str, path: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').collect();
    for part in path.split('/') {
        if part == ".." {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    parts.join("/")
}

/// Code without what stands between the braces of macros, those that are defined and those that are called.
fn outside_macros(code: &str) -> String {
    let mut outside = String::new();
    let mut rest = code;
    while let Some((before, after)) = rest.split_once('!') {
        outside.push_str(before);
        // `name! {`, `macro_rules! name {`; all else with a `!` has no modules in it.
        let named = before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let body = after.trim_start().trim_start_matches(|c: char| c.is_alphanumeric() || c == '_').trim_start();
        rest = if named && body.starts_with('{') { &body[braces_length(body)..] } else { after };
    }
    outside + rest
}

fn braces_length(code: &str) -> usize {
    let mut depth = 0_usize;
    for (at, c) in code.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    code.len()
}

/// Retired words in a file, wherever they stand: `woven_rows`, `WovenRows` and "rows are woven" are all found.
fn retired_words(file: &str, text: &str) -> Vec<String> {
    let plain = file.strip_prefix("crates/").and_then(|rest| rest.split('/').next());
    let plain = plain.is_some_and(|name| PLAIN_CRATES.contains(&name));
    let words: Vec<&(&str, &str)> = RETIRED_NAMES.iter().chain(RETIRED_WORDS.iter().filter(|_| plain)).collect();
    let mut problems = Vec::new();
    for (number, line) in numbered(text) {
        let spoken = spoken(line);
        let found = words.iter().filter(|(word, _)| spoken.contains(&format!(" {word} ")));
        problems.extend(found.map(|(word, instead)| format!("{file}:{number}: \"{word}\"; write {instead}")));
    }
    problems
}

/// A line as lower-case words with one space around each: names fall apart at underscores and capital letters.
fn spoken(line: &str) -> String {
    let mut spoken = String::from(" ");
    let mut after_small = false;
    for c in line.chars() {
        if (c.is_uppercase() && after_small) || !c.is_alphanumeric() {
            spoken.push(' ');
        }
        spoken.extend(c.to_lowercase().filter(|c| c.is_alphanumeric()));
        after_small = c.is_lowercase() || c.is_numeric();
    }
    let words: Vec<&str> = spoken.split_whitespace().collect();
    format!(" {} ", words.join(" "))
}

/// Public types of a crate that have the same name and are no exceptions, and exceptions that are none any more. Files come with their text.
fn same_names(folder: &str, files: &[(String, String)]) -> Vec<String> {
    let mut found: Vec<(String, String)> = Vec::new();
    for (file, text) in files {
        let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        for (number, line) in numbered(text) {
            let Some(rest) = line.trim_start().strip_prefix("pub ") else { continue };
            let mut words = rest.split(|c: char| !c.is_alphanumeric() && c != '_');
            if matches!(words.next(), Some("struct" | "enum" | "trait" | "type" | "union")) {
                found.push((words.next().unwrap_or_default().to_owned(), format!("{file}:{number}")));
            }
        }
    }
    let allowed = SAME_NAMES.iter().find(|(name, _)| *name == folder).map_or(&[][..], |(_, names)| names);
    let count = |name: &str| found.iter().filter(|(other, _)| other == name).count();
    let twice = found.iter().filter(|(name, _)| count(name) > 1 && !allowed.contains(&name.as_str()));
    let mut problems: Vec<String> =
        twice.map(|(name, place)| format!("{place}: {folder} has another public type `{name}`")).collect();
    let gone = allowed.iter().filter(|name| count(name) < 2);
    problems.extend(gone.map(|name| format!("crates/{folder}: `{name}` is there once; take it off SAME_NAMES")));
    problems
}

// --- reading --------------------------------------------------------------------------------------------------------

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

fn words(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').collect()
}

fn extension_of(file: &str) -> Option<&str> {
    file.rsplit_once('.').map(|(_, extension)| extension)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Every file of the repository with a slash-separated path from its root; build output and data are left out.
fn repository_files() -> Vec<String> {
    fn walk(folder: &Path, prefix: &str, files: &mut Vec<String>) {
        let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for entry in entries {
            let entry = entry.expect("a folder entry should be readable");
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}/{name}") };
            let kind = entry.file_type().expect("a folder entry should have a type");
            if kind.is_dir() && !["target", ".git", ".cache", "corpus", "artifacts"].contains(&name.as_str()) {
                walk(&entry.path(), &path, files);
            } else if kind.is_file() {
                files.push(path);
            }
        }
    }
    let mut files = Vec::new();
    walk(&root(), "", &mut files);
    files.sort();
    assert!(files.iter().any(|file| file == "crates/kiln/tests/tidy.rs"), "the walk should find this very file");
    files
}

fn assert_none(problems: Vec<String>) {
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

fn rust_files() -> Vec<String> {
    repository_files().into_iter().filter(|file| file.ends_with(".rs")).collect()
}

// --- the repository -------------------------------------------------------------------------------------------------

#[test]
fn crates_depend_only_downwards() {
    let folders = fs::read_dir(root().join("crates")).expect("crates/ should be readable");
    let folders: Vec<_> = folders.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    assert!(folders.len() >= 2, "crates/ should hold the workspace");
    assert_none(
        folders
            .iter()
            .flat_map(|folder| wrong_dependencies(folder, &read(&format!("crates/{folder}/Cargo.toml"))))
            .collect(),
    );
}

#[test]
fn paths_in_the_pages_exist() {
    let starts = ["", "crates", "crates/kernels/src"];
    let exists = |path: &str| starts.iter().any(|start| root().join(start).join(path).exists());
    let files = repository_files();
    let pages = files.iter().filter(|file| file.ends_with(".md") && (!file.contains('/') || file.starts_with("docs/")));
    assert_none(pages.flat_map(|page| missing_paths(page, &read(page), exists)).collect());
}

#[test]
fn files_keep_to_their_line_budget() {
    let files = repository_files();
    let counted =
        files.iter().filter(|file| BUDGETS.iter().any(|(extension, _)| extension_of(file) == Some(*extension)));
    assert_none(counted.flat_map(|file| too_long(file, &read(file))).collect());
}

#[test]
fn names_say_what_files_hold() {
    assert_none(repository_files().iter().flat_map(|file| empty_name(file)).collect());
}

#[test]
fn rust_files_begin_with_a_heading() {
    assert_none(rust_files().iter().flat_map(|file| no_heading(file, &read(file))).collect());
}

#[test]
fn no_unsafe_outside_the_gpu_border_and_nothing_unfinished() {
    assert_none(rust_files().iter().flat_map(|file| forbidden_words(file, &read(file))).collect());
}

#[test]
fn operating_systems_are_told_apart_in_one_folder() {
    assert_none(rust_files().iter().flat_map(|file| systems_told_apart(file, &read(file))).collect());
}

#[test]
fn kernel_folders_are_complete_and_registered() {
    assert_none(incomplete_rooms(&repository_files(), &read("crates/kernels/src/lib.rs")));
}

#[test]
fn names_comments_and_messages_use_the_words_of_the_field() {
    let is_code = |file: &&String| {
        file.starts_with("crates/") && ["rs", "comp", "glsl"].iter().any(|e| extension_of(file) == Some(e))
    };
    let files = repository_files();
    let own = "crates/kiln/tests/tidy.rs";
    let checked = files.iter().filter(is_code).filter(|file| *file != own);
    assert_none(checked.flat_map(|file| retired_words(file, &read(file))).collect());
}

#[test]
fn public_types_of_a_crate_have_names_of_their_own() {
    let files = repository_files();
    let of = |folder: &str| -> Vec<(String, String)> {
        let source = format!("crates/{folder}/src/");
        let own = files.iter().filter(|file| file.starts_with(&source) && file.ends_with(".rs"));
        // One of these files is compiled: they offer the same names by design.
        let own = own.filter(|file| !file.starts_with("crates/system/src/os/"));
        own.map(|file| (file.clone(), read(file))).collect()
    };
    assert_none(LEVELS.iter().flat_map(|(folder, _)| same_names(folder, &of(folder))).collect());
}

#[test]
fn rustfmt_reaches_every_file() {
    assert_none(unformatted(&repository_files(), read));
}

// --- the checks see what is wrong -----------------------------------------------------------------------------------

/// Asserts that there is exactly one problem and that it begins with this file and line.
fn assert_one(problems: Vec<String>, place: &str) {
    assert!(
        problems.len() == 1 && problems[0].starts_with(&format!("{place}: ")),
        "expected one at {place}: {problems:?}"
    );
}

#[test]
fn an_upward_dependency_is_seen_in_every_spelling() {
    for line in [
        "kiln-engine.workspace = true",
        "kiln-engine = { path = \"../engine\" }",
        "other = { package = \"kiln-engine\", version = \"1\" }",
        "other = { path = \"../engine\" }",
    ] {
        for table in ["dependencies", "dev-dependencies", "build-dependencies", "target.'cfg(unix)'.dependencies"] {
            let manifest = format!("[package]\nname = \"x\"\n[{table}]\nkiln-gguf.workspace = true # fine\n{line}\n");
            assert_one(wrong_dependencies("kernels", &manifest), "crates/kernels/Cargo.toml:5");
            assert_none(wrong_dependencies("server", &manifest));
        }
    }
    assert_one(wrong_dependencies("gguf", "[dependencies.kiln-gpu]\npath = \"x\"\n"), "crates/gguf/Cargo.toml:1");
    assert_one(wrong_dependencies("gpu", "[dependencies]\nkiln-gguf.workspace = true"), "crates/gpu/Cargo.toml:2");
    assert_one(
        wrong_dependencies("server", "[dependencies]\nkiln = { path = \"../kiln\" }"),
        "crates/server/Cargo.toml:2",
    );
    assert_one(wrong_dependencies("attic", ""), "crates/attic/Cargo.toml:1");
    assert_none(wrong_dependencies("kiln", "[package]\nname = \"kiln\"\n[dependencies]\nkiln-server.workspace = true"));
}

#[test]
fn a_path_that_is_gone_is_seen() {
    let missing = |text: &str| missing_paths("A.md", text, |path| ["crates/gpu", "scripts/test"].contains(&path));
    assert_one(missing("fine\n`crates/gone/src/lib.rs`"), "A.md:2");
    assert_one(missing("`gpu/src/gone.rs` and `a/b`, `gone.rs`, `f32/f16`"), "A.md:1");
    assert_one(missing("run `scripts/gone --fast` twice"), "A.md:1");
    assert_one(missing("`crates/gone/<op>/mod.rs`"), "A.md:1");
    assert_one(missing("```\n`crates/fenced`\n```\n`.ci/gone`"), "A.md:4");
    assert_none(missing(
        "`crates/gpu/`, `crates/gpu/*.rs`, `scripts/test --x`, `/etc/x.json`, `https://a.b/c.md`, crates/plain",
    ));
}

#[test]
fn a_long_file_is_seen() {
    assert_one(too_long("a/b.rs", &"\n".repeat(801)), "a/b.rs:801");
    assert_one(too_long("a/b.comp", &"\n".repeat(501)), "a/b.comp:501");
    assert_one(too_long("a/b.glsl", &"\n".repeat(501)), "a/b.glsl:501");
    assert_none(too_long("a/b.rs", &"\n".repeat(800)));
    assert_none(too_long("a/b.md", &"\n".repeat(2000)));
}

#[test]
fn an_empty_name_is_seen() {
    assert_one(empty_name("crates/gpu/src/utils.rs"), "crates/gpu/src/utils.rs:1");
    assert_one(empty_name("crates/gpu/tests/common/mod.rs"), "crates/gpu/tests/common/mod.rs:1");
    assert_none(empty_name("crates/gguf/src/base64.rs"));
}

#[test]
fn a_missing_heading_is_seen() {
    assert_one(no_heading("a.rs", "use std::fs;\n//! Late."), "a.rs:1");
    assert_one(no_heading("a.rs", ""), "a.rs:1");
    assert_none(no_heading("a.rs", "//! What lives here.\n"));
}

#[test]
fn forbidden_words_are_seen_only_in_code() {
    let check = |text: &str| forbidden_words("crates/engine/src/x.rs", text);
    let place = "crates/engine/src/x.rs";
    assert_one(check("fn a() {\n    unsafe { b() }\n}"), &format!("{place}:2"));
    assert_one(check("/* a /* b */\n */ todo!()"), &format!("{place}:2"));
    assert_one(check("let s = \"x\\\"\n\"; std::unimplemented!(\"later\")"), &format!("{place}:2"));
    assert_one(check("#[test]\n#[ ignore = \"slow\" ]\nfn a() {}"), &format!("{place}:2"));
    assert_one(check("let q = '\"'; let e = '\\''; fn a<'a>(x: &'a str) { unsafe {} } // \""), &format!("{place}:1"));
    assert_one(check("let r = br#\"unsafe \" todo!() \"#; unsafe {}"), &format!("{place}:1"));
    assert_none(check(
        "#![forbid(unsafe_code)] // unsafe todo!()\nlet s = \"unsafe #[ignore]\"; let todo = ['\\u{1}', 'é'];",
    ));
    assert_none(forbidden_words("crates/gpu/src/x.rs", "unsafe {}"));
    assert_none(forbidden_words("crates/gguf/src/map.rs", "unsafe {}"));
    assert_one(forbidden_words("crates/gguf/src/lib.rs", "unsafe {}"), "crates/gguf/src/lib.rs:1");
}

#[test]
fn a_question_for_the_operating_system_is_seen() {
    let file = "crates/store/src/x.rs";
    let check = |text: &str| systems_told_apart(file, text);
    for line in [
        "#[cfg(unix)]",
        "use std::os::unix::fs::symlink;",
        "#[cfg(any(test, target_os = \"linux\"))]",
        "libc::getpid();",
    ] {
        assert_one(check(&format!("fn a() {{}}\n{line}\nfn b() {{}}")), &format!("{file}:2"));
    }
    assert!(check("// cfg(unix)\nfn a() {}\n#[cfg(test)]\nmod tests { use std::os::unix::fs::symlink; }").is_empty());
    assert!(systems_told_apart("crates/system/src/os/mod.rs", "#[cfg(unix)]").is_empty());
}

#[test]
fn retired_words_are_seen_in_names_comments_and_messages() {
    let place = "crates/gpu/src/x.rs";
    for line in
        ["fn woven_rows() {}", "struct WovenRows;", "// Rows are woven.", "format!(\"{n} woven rows\")", "WOVEN_ROWS"]
    {
        assert_one(retired_words(place, &format!("fine\n{line}")), &format!("{place}:2"));
        assert_one(retired_words("crates/engine/src/x.rs", line), "crates/engine/src/x.rs:1");
    }
    for line in [
        "// Whoever comes first",
        "// so many bytes",
        "// this goes  on",
        "\"in the place of a file\"",
        "fn hand_over() {}",
    ] {
        assert_one(retired_words(place, line), &format!("{place}:1"));
        assert_none(retired_words("crates/engine/src/x.rs", line));
    }
    assert_none(retired_words(place, "// interwoven, bloom, shelves, so manyfold"));
}

#[test]
fn two_public_types_of_one_name_are_seen() {
    let file = |name: &str, text: &str| (format!("crates/gpu/src/{name}.rs"), text.to_owned());
    let both = [file("a", "pub struct Call {\n}"), file("b", "\n    pub enum Call {\n}")];
    let problems = same_names("gpu", &both);
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(problems[1].starts_with("crates/gpu/src/b.rs:2: "), "{problems:?}");
    let apart = [
        file("a", "pub struct Call;\nstruct Line;\npub(crate) struct Row;"),
        file("b", "struct Call;\npub struct Line;"),
    ];
    assert_none(same_names("gpu", &apart));
    let tests = [file("a", "pub struct Call;\n#[cfg(test)]\nmod tests { pub struct Call; }")];
    assert_none(same_names("gpu", &tests));
    assert_eq!(same_names("engine", &both).len(), 2 + 9, "exceptions that are not needed");
}

#[test]
fn an_incomplete_kernel_folder_is_seen() {
    let room = |leave_out: &str| -> Vec<String> {
        let files = ["add.comp", "mod.rs", "reference.rs", "cases.rs"].into_iter().filter(|name| *name != leave_out);
        files.map(|name| format!("crates/kernels/src/add/{name}")).collect()
    };
    assert_none(incomplete_rooms(&room(""), "add => Add,"));
    for needed in ROOM {
        assert_one(incomplete_rooms(&room(needed), "add => Add,"), &format!("crates/kernels/src/add/{needed}:1"));
    }
    assert_one(incomplete_rooms(&room(""), "pub mod add; address => Add, // add =>"), "crates/kernels/src/lib.rs:1");
    assert_none(incomplete_rooms(&["crates/kernels/src/harness/mod.rs".to_owned()], ""));
}

#[test]
fn a_module_that_a_macro_hides_is_seen() {
    let text = |file: &str| {
        let text = match file {
            "crates/a/src/lib.rs" => {
                "macro_rules! all { ($($m:ident),*) => { $(pub mod $m;)* }; }\nall! { hidden }\n\
                 macro_rules! typed { ($m:ident) => { mod spelled; }; }\n\
                 mod seen;\n#[cfg_attr(windows, path = \"other.rs\")]\npub(crate) mod folder;\n// mod commented;\n"
            }
            "crates/a/src/folder/mod.rs" => "mod inner;",
            "crates/a/src/seen.rs" => "mod below; fn a() { if x != y { z() } }",
            "crates/a/tests/one.rs" => "#[path = \"../../b/tests/two/mod.rs\"]\nmod two;",
            _ => "",
        };
        text.to_owned()
    };
    let check = |more: &[&str]| {
        let known = [
            "a/src/lib.rs",
            "a/src/seen.rs",
            "a/src/other.rs",
            "a/src/folder/mod.rs",
            "a/src/folder/inner.rs",
            "a/src/seen/below.rs",
            "a/tests/one.rs",
            "b/tests/two/mod.rs",
            "a/build.rs",
        ];
        let files: Vec<String> = known.iter().chain(more).map(|file| format!("crates/{file}")).collect();
        unformatted(&files, text)
    };
    assert_none(check(&[]));
    for missed in ["a/src/hidden.rs", "a/src/spelled.rs", "a/src/commented.rs", "a/src/below.rs", "b/src/seen.rs"] {
        assert_one(check(&[missed]), &format!("crates/{missed}:1"));
    }
}
