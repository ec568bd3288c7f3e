//! JSON schemas before they are compiled: limits, and where in a schema the mistake is.

use serde_json::{Map, Value as Json, json};

/// What a schema may have.
const MAX_BYTES: usize = 1 << 20;
const MAX_DEPTH: usize = 64;
const MAX_NODES: usize = 50_000;
const MAX_ENUM: usize = 10_000;
/// Keys of one object: the time that they take grows with their square.
pub(super) const MAX_KEYS: usize = 1_000;
/// Bytes of a key, and of any other string.
const MAX_KEY_BYTES: usize = 1 << 10;
const MAX_STRING_BYTES: usize = 64 << 10;
/// Subschemas that are tried in search of a mistake.
const MAX_TRIES: usize = 200;

/// A problem and where it is.
pub(super) struct Problem {
    pub(super) pointer: String,
    pub(super) what: String,
}

/// Checks the size of a schema before anything walks it deeper.
pub(super) fn check(schema: &Json) -> Result<(), Problem> {
    // Iterative: a deep value must not use up the stack.
    let mut stack: Vec<(&Json, String, usize)> = vec![(schema, String::new(), 0)];
    let (mut nodes, mut bytes) = (0usize, 0usize);
    while let Some((value, pointer, depth)) = stack.pop() {
        nodes += 1;
        let refuse = |what: String| Err(Problem { pointer: pointer.clone(), what });
        if depth > MAX_DEPTH {
            return refuse(format!("the schema is nested more than {MAX_DEPTH} deep"));
        }
        if nodes > MAX_NODES {
            return refuse(format!("the schema has more than {MAX_NODES} values"));
        }
        match value {
            Json::Array(items) => {
                if items.len() > MAX_ENUM {
                    return refuse(format!("a list of {} is too long, {MAX_ENUM} are allowed", items.len()));
                }
                stack.extend(items.iter().enumerate().map(|(at, item)| (item, format!("{pointer}/{at}"), depth + 1)));
            }
            Json::Object(map) => {
                if map.len() > MAX_KEYS {
                    return refuse(format!("an object of {} keys is too large, {MAX_KEYS} are allowed", map.len()));
                }
                for (key, item) in map {
                    if key.len() > MAX_KEY_BYTES {
                        return refuse(format!(
                            "a key of {} bytes is too long, {MAX_KEY_BYTES} are allowed",
                            key.len()
                        ));
                    }
                    bytes += key.len() + 4;
                    stack.push((item, format!("{pointer}/{}", escape(key)), depth + 1));
                }
            }
            Json::String(text) if text.len() > MAX_STRING_BYTES => {
                return refuse(format!("a string of {} bytes is too long, {MAX_STRING_BYTES} are allowed", text.len()));
            }
            Json::String(text) => bytes += text.len() + 2,
            _ => bytes += 4,
        }
        if bytes > MAX_BYTES {
            return refuse(format!("the schema is larger than {MAX_BYTES} bytes"));
        }
    }
    match schema {
        Json::Object(_) => Ok(()),
        Json::Bool(_) => Ok(()),
        _ => Err(Problem { pointer: String::new(), what: "a schema is an object".into() }),
    }
}

fn escape(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// The schema as it is compiled: an empty one means an object, options of the compiler itself are removed from it and
/// white space is bounded, since free white space lets weak models write it without end.
pub(super) fn prepared(schema: &Json) -> Json {
    let mut map = match schema {
        Json::Object(map) if !map.is_empty() => map.clone(),
        Json::Bool(false) => return Json::Bool(false),
        _ => {
            let mut map = Map::new();
            map.insert("type".into(), "object".into());
            map
        }
    };
    map.iter_mut().filter(|(key, _)| !DATA.contains(&key.as_str())).for_each(|(_, value)| narrow(value));
    narrow_formats(&mut map);
    map.remove("x-guidance");
    let options = json!({"whitespace_flexible": true, "whitespace_pattern": r"[ \t\n]{0,40}"});
    map.insert("x-guidance".into(), options);
    Json::Object(map)
}

/// Hours, minutes, seconds and the zone of RFC 3339, without leap seconds and small letters, which most parsers refuse.
const TIME: &str =
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
/// Days that exist; the year 0 does not.
const DATE: &str = concat!(
    r"(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-",
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|",
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
);

/// Keywords whose values are data and no schemas.
const DATA: [&str; 5] = ["const", "enum", "default", "example", "examples"];

/// Writes out the formats of dates and times in every part of a schema: what the compiler takes for one is more than clients read.
fn narrow(part: &mut Json) {
    match part {
        Json::Object(map) => {
            map.iter_mut().filter(|(key, _)| !DATA.contains(&key.as_str())).for_each(|(_, value)| narrow(value));
            narrow_formats(map);
        }
        Json::Array(list) => list.iter_mut().for_each(narrow),
        _ => {}
    }
}

fn narrow_formats(map: &mut Map<String, Json>) {
    let pattern = match map.get("format").and_then(Json::as_str) {
        Some("date-time") => format!("^{DATE}T{TIME}$"),
        Some("date") => format!("^{DATE}$"),
        Some("time") => format!("^{TIME}$"),
        _ => return,
    };
    if !map.contains_key("pattern") {
        map.remove("format");
        map.insert("pattern".into(), pattern.into());
    }
}

/// Looks for the smallest part of a schema that does not compile. `compile` says what is wrong with a schema.
pub(super) fn locate(schema: &Json, what: String, compile: impl Fn(&Json) -> Option<String>) -> Problem {
    let mut problem = Problem { pointer: String::new(), what };
    let mut tries = 0;
    let mut at = schema;
    // Definitions stay at hand for references.
    let definitions: Vec<(&str, &Json)> =
        ["$defs", "definitions"].into_iter().filter_map(|key| Some((key, schema.get(key)?))).collect();
    'deeper: loop {
        for (pointer, child) in children(at) {
            tries += 1;
            if tries > MAX_TRIES {
                return problem;
            }
            let mut alone = child.clone();
            if let Json::Object(map) = &mut alone {
                for (key, value) in &definitions {
                    map.entry(*key).or_insert_with(|| (*value).clone());
                }
            }
            if let Some(what) = compile(&alone) {
                problem = Problem { pointer: problem.pointer + &pointer, what };
                at = child;
                continue 'deeper;
            }
        }
        return problem;
    }
}

/// The subschemas right below a schema.
fn children(schema: &Json) -> Vec<(String, &Json)> {
    let mut found = Vec::new();
    for key in ["properties", "patternProperties", "$defs", "definitions"] {
        if let Some(Json::Object(map)) = schema.get(key) {
            found.extend(map.iter().map(|(name, child)| (format!("/{key}/{}", escape(name)), child)));
        }
    }
    for key in ["anyOf", "oneOf", "allOf", "prefixItems"] {
        if let Some(Json::Array(list)) = schema.get(key) {
            found.extend(list.iter().enumerate().map(|(at, child)| (format!("/{key}/{at}"), child)));
        }
    }
    for key in ["items", "additionalProperties"] {
        found.extend(schema.get(key).filter(|child| child.is_object()).map(|child| (format!("/{key}"), child)));
    }
    found
}
