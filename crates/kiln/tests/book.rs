//! Keeps the book in order: `docs/SUMMARY.md` names every page of `docs` once, every relative link and anchor in the pages
//! leads somewhere, what new users look for is two links away, and every speed has a source. Each check is a pure function from text to
//! problems; the tests run it over the repository and over bad input.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Pages beside `docs` whose links are checked, too.
const ROOT_PAGES: [&str; 6] =
    ["ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"];
const SUMMARY: &str = "docs/SUMMARY.md";
const INCLUDE: &str = "{{#include ";

// --- the checks -----------------------------------------------------------------------------------------------------

/// Pages of `docs` that the summary does not name exactly once.
fn outside_the_summary(pages: &BTreeMap<String, String>) -> Vec<String> {
    let summary = pages.get(SUMMARY).map_or("", String::as_str);
    let named: Vec<String> =
        links(summary).into_iter().filter_map(|(_, target)| resolved(SUMMARY, target.split('#').next()?)).collect();
    let book = pages.keys().filter(|page| page.starts_with("docs/") && *page != SUMMARY);
    book.filter_map(|page| match named.iter().filter(|name| *name == page).count() {
        1 => None,
        count => Some(format!("{page}:1: {SUMMARY} names it {count} times, it should be once")),
    })
    .collect()
}

/// Relative links of a page that lead nowhere. Pages of the book may link only to what lies in `docs`: the rest is not in the book.
fn broken_links(page: &str, pages: &BTreeMap<String, String>, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut problems = Vec::new();
    let text = pages.get(page).map_or("", String::as_str);
    for (line, target) in links(text) {
        if target.contains("://") || target.starts_with("mailto:") {
            continue;
        }
        let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
        let found = if path.is_empty() { Some(page.to_owned()) } else { resolved(page, path) };
        let Some(found) = found.filter(|found| exists(found)) else {
            problems.push(format!("{page}:{line}: the link `{target}` leads nowhere"));
            continue;
        };
        if page.starts_with("docs/") && !found.starts_with("docs/") {
            problems.push(format!("{page}:{line}: the link `{target}` leads out of the book"));
        }
        if !anchor.is_empty() && !anchors(&found, pages).contains(anchor) {
            problems.push(format!("{page}:{line}: {found} has no heading `#{anchor}`"));
        }
    }
    // The text of an included page stands in another folder, where its relative links would break.
    for (line, included) in includes(page, text) {
        match pages.get(&included) {
            None => problems.push(format!("{page}:{line}: {included} is not there")),
            Some(text) => {
                let relative = links(text).into_iter().filter(|(_, target)| !target.contains("://"));
                problems.extend(relative.map(|(at, target)| {
                    format!("{included}:{at}: `{target}`: {page} includes this page, where the link breaks; name the path in backticks")
                }));
            }
        }
    }
    problems
}

/// The targets of links and pictures with their lines, outside code.
fn links(markdown: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (number, line) in prose(markdown) {
        // Every second piece between backticks is code.
        for piece in line.split('`').step_by(2) {
            found.extend(piece.split("](").skip(1).filter_map(|rest| Some((number, rest.split_once(')')?.0))));
        }
    }
    found
}

/// Lines outside fenced and indented code, numbered from 1.
fn prose(markdown: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    markdown.lines().enumerate().filter_map(move |(at, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence && !line.starts_with("    ")).then_some((at + 1, line))
    })
}

/// Anchors of a page's headings, as mdBook and GitHub make them.
fn anchors(page: &str, pages: &BTreeMap<String, String>) -> BTreeSet<String> {
    let text = pages.get(page).map_or("", String::as_str);
    let mut found = BTreeSet::new();
    let headings = prose(text).filter(|(_, line)| line.starts_with('#'));
    for (_, line) in headings {
        let anchor = anchor_of(line.trim_start_matches('#').trim());
        let mut name = anchor.clone();
        let mut count = 0;
        while !found.insert(name) {
            count += 1;
            name = format!("{anchor}-{count}");
        }
    }
    for (_, included) in includes(page, text) {
        found.extend(anchors(&included, pages));
    }
    found
}

fn anchor_of(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | ' '));
    kept.map(|c| if c == ' ' { '-' } else { c }).flat_map(char::to_lowercase).collect()
}

/// Pages that this one takes in whole.
fn includes(page: &str, text: &str) -> Vec<(usize, String)> {
    let lines = text.lines().enumerate();
    lines
        .filter_map(|(at, line)| {
            Some((at + 1, resolved(page, line.strip_prefix(INCLUDE)?.trim_end_matches(['}', ' ']))?))
        })
        .collect()
}

/// The path from the repository's root that a relative one in a page means; nothing where it leaves the repository.
fn resolved(page: &str, relative: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in relative.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => {
                parts.pop()?;
            }
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Pages of measurements: their tables and entries name their commands once for many numbers.
const MEASURED: [&str; 5] = ["docs/ladder/", "docs/notes/", "docs/results.md", "docs/amd.md", "docs/judged.md"];
/// What follows the number in a claim about speed.
const SPEEDS: [&str; 8] = ["tokens/s", "TB/s", "GB/s", "TFLOP/s", "us", "times as fast", "times faster", "% faster"];
/// What the target of a link says that leads to a measurement.
const SOURCES: [&str; 5] = ["results", "slower", "notes/", "ladder/", "quantisation"];

/// Claims about speed whose paragraph, item or row names neither a command nor a page of measurements.
fn claims_without_a_source(page: &str, text: &str) -> Vec<String> {
    let (mut problems, mut made) = (Vec::new(), false);
    let mut blocks: Vec<(usize, String)> = Vec::new();
    for (at, line) in prose(text) {
        made |= line.ends_with("made by scripts/docs/results -->");
        let begins = line.is_empty() || line.starts_with("- ") || line.starts_with('|');
        match blocks.last_mut() {
            Some((_, block)) if !begins && !made => *block = format!("{block} {line}"),
            _ if !made => blocks.push((at, line.to_owned())),
            _ => {}
        }
        made &= !line.starts_with("<!-- end of ");
    }
    for (line, block) in blocks {
        let sourced = links(&block).iter().any(|(_, target)| SOURCES.iter().any(|source| target.contains(source)));
        let command =
            block.split('`').skip(1).step_by(2).any(|code| ["kiln ", "scripts/"].iter().any(|c| code.starts_with(c)));
        if let Some(speed) = SPEEDS.iter().find(|unit| claims(&block, unit)).filter(|_| !sourced && !command) {
            problems.push(format!("{page}:{line}: a number of {speed} without the command or the page it is from"));
        }
    }
    problems
}

/// Whether a number stands before this unit.
fn claims(text: &str, unit: &str) -> bool {
    let is_number = |before: &str| before.ends_with(|c: char| c.is_ascii_digit());
    let is_whole = |behind: &str| !behind.starts_with(|c: char| c.is_alphanumeric());
    text.match_indices(unit)
        .any(|(at, _)| is_whole(&text[at + unit.len()..]) && text[..at].strip_suffix(' ').is_some_and(is_number))
}

/// All pages that are at most this many links away from a page.
fn within_clicks(clicks: usize, from: &str, pages: &BTreeMap<String, String>) -> BTreeSet<String> {
    let mut reached = BTreeSet::from([from.to_owned()]);
    for _ in 0..clicks {
        let next: Vec<String> = reached
            .iter()
            .filter_map(|page| Some((page, pages.get(page)?)))
            .flat_map(|(page, text)| {
                links(text).into_iter().filter_map(|(_, to)| resolved(page, to.split('#').next()?))
            })
            .collect();
        reached.extend(next);
    }
    reached
}

// --- the repository -------------------------------------------------------------------------------------------------

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All Markdown pages of `docs` and those of the root, by their path from there.
fn pages() -> BTreeMap<String, String> {
    fn walk(folder: &str, into: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(root().join(folder)).expect("a readable folder") {
            let entry = entry.expect("a readable folder");
            let path = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                walk(&path, into);
            } else if path.ends_with(".md") {
                into.insert(path, fs::read_to_string(entry.path()).expect("UTF-8"));
            }
        }
    }
    let mut pages = BTreeMap::new();
    walk("docs", &mut pages);
    for page in ROOT_PAGES {
        pages.insert(page.to_owned(), fs::read_to_string(root().join(page)).expect(page));
    }
    pages
}

fn assert_none(problems: Vec<String>) {
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn the_summary_names_every_page() {
    let pages = pages();
    assert!(pages.len() > 30, "docs/ should hold the book");
    assert_none(outside_the_summary(&pages));
}

#[test]
fn every_link_and_anchor_leads_somewhere() {
    let pages = pages();
    let exists = |path: &str| root().join(path).exists();
    assert_none(pages.keys().flat_map(|page| broken_links(page, &pages, exists)).collect());
}

#[test]
fn every_speed_has_its_command_or_its_page() {
    let pages = pages();
    let claimed = pages.iter().filter(|(page, _)| !MEASURED.iter().any(|measured| page.starts_with(measured)));
    assert_none(claimed.flat_map(|(page, text)| claims_without_a_source(page, text)).collect());
}

#[test]
fn what_new_users_look_for_is_two_links_away() {
    let pages = pages();
    for start in ["README.md", "docs/introduction.md"] {
        let reached = within_clicks(2, start, &pages);
        for (wanted, words) in [
            ("installing", "cargo install --path crates/kiln"),
            ("the first chat", "kiln chat\n"),
            ("the first request", "curl http://127.0.0.1:8080/v1/chat/completions"),
            ("an error message", "### \"the context holds\""),
            ("the speed of a format", "### GEMV by format"),
        ] {
            let there = reached
                .iter()
                .filter(|page| *page != start)
                .any(|page| pages.get(page).is_some_and(|text| text.contains(words)));
            assert!(there, "{wanted}: no page within two links of {start} has {words:?}");
        }
    }
}

// --- the checks see what is wrong -----------------------------------------------------------------------------------

fn book(pages: &[(&str, &str)]) -> BTreeMap<String, String> {
    pages.iter().map(|(page, text)| ((*page).to_owned(), (*text).to_owned())).collect()
}

/// The beginnings of the problems of one page beside `docs/b.md`, `docs/in/c.md`, which includes `ROOT.md`, and `ROOT.md`.
fn problems_of(page: &str, text: &str) -> Vec<String> {
    let pages = book(&[
        ("docs/b.md", "# Two `words`, one\n```\n# no heading\n```\n## Again\n## Again\n"),
        ("docs/in/c.md", "{{#include ../../ROOT.md}}\n"),
        ("ROOT.md", "# From the root\n"),
        (page, text),
    ]);
    broken_links(page, &pages, |path| pages.contains_key(path))
}

#[test]
fn a_page_that_the_summary_forgets_or_repeats_is_seen() {
    let with = |summary: &str| {
        outside_the_summary(&book(&[(SUMMARY, summary), ("docs/a.md", ""), ("docs/in/b.md", ""), ("ROOT.md", "")]))
    };
    assert_none(with("- [A](a.md)\n  - [B](in/b.md)\n"));
    assert_eq!(with("- [A](a.md)\n").len(), 1);
    assert_eq!(with("- [A](a.md)\n- [A](a.md)\n- [B](in/b.md)\n").len(), 1);
}

#[test]
fn a_broken_link_is_seen() {
    for good in [
        "[b](b.md) and ![c](in/c.md), [d](https://example.org/x.md#y)",
        "[b](b.md#two-words-one) [b](b.md#again-1) [c](in/c.md#from-the-root)",
        "# Here\n[h](#here)",
        "`[x](gone.md)`\n    [x](gone.md)\n```\n[x](gone.md)\n```\n[`b`](b.md)",
    ] {
        assert_none(problems_of("docs/a.md", good));
    }
    for bad in [
        "fine\n[x](gone.md)",
        "fine\n[`x`](gone.md)",
        "fine\n[b](b.md#no-heading)",
        "fine\n[h](#here)",
        "fine\n[r](../ROOT.md)",
        "fine\n[r](../../../x.md)",
        "fine\n{{#include ../GONE.md}}",
    ] {
        let problems = problems_of("docs/a.md", bad);
        assert!(problems.len() == 1 && problems[0].starts_with("docs/a.md:2: "), "{bad}: {problems:?}");
    }
    assert_none(problems_of("README.md", "[r](ROOT.md) [b](docs/b.md#again)"));
}

#[test]
fn a_relative_link_of_an_included_page_is_seen() {
    let pages = book(&[("docs/in/c.md", "{{#include ../../ROOT.md}}"), ("ROOT.md", "\n[x](docs/in/c.md)")]);
    let problems = broken_links("docs/in/c.md", &pages, |_| true);
    assert!(problems.len() == 1 && problems[0].starts_with("ROOT.md:2: "), "{problems:?}");
}

#[test]
fn a_speed_without_a_source_is_seen() {
    for good in [
        "- It gives 12 tokens/s (`kiln bench m.gguf`).\n",
        "It gives 1,200 tokens/s,\nas the [results](results.md#x) say.",
        "    12 tokens/s\n\nuse 3\n\ntokens/s are a unit",
        "<!-- results: made by scripts/docs/results -->\n12 tokens/s\n<!-- end of results -->\n",
    ] {
        assert_none(claims_without_a_source("docs/a.md", good));
    }
    for bad in [
        "fine\n\nIt gives 12 tokens/s.",
        "- [results](results.md)\n- It is 2.5 times as fast (`--fast`).",
        "fine\n\nA step takes 40\nus, [see](b.md).",
        "<!-- results: made by scripts/docs/results -->\n1\n<!-- end of results -->\nIt is 2 % faster.",
    ] {
        assert_eq!(claims_without_a_source("docs/a.md", bad).len(), 1, "{bad}");
    }
}

#[test]
fn a_page_that_is_too_far_is_seen() {
    let pages = book(&[
        ("A.md", "[b](docs/b.md)"),
        ("docs/b.md", "[c](c.md#x)"),
        ("docs/c.md", "[d](d.md)"),
        ("docs/d.md", ""),
    ]);
    let reached = within_clicks(2, "A.md", &pages);
    assert!(reached.contains("docs/c.md") && !reached.contains("docs/d.md"), "{reached:?}");
}
