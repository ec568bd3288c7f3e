//! Where an MCP server is, as users write it: on the command line, in Kiln's config file, or in the JSON file that other programs have, too.

use std::path::{Path, PathBuf};

use kiln_system::text::shown;
use serde_json::Value;

use super::words::words;
use crate::names::is_server_name;
use crate::tool::Approval;

/// What keeps a server from being understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what}: {why}\nhint: an MCP server is NAME=COMMAND, NAME=https://HOST/PATH, or a JSON file with \"mcpServers\""
)]
pub struct SpecError {
    what: String,
    why: String,
}

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A program, which is started.
    Command {
        /// The program.
        program: String,
        /// What it is told.
        arguments: Vec<String>,
        /// Variables of its environment, beside the few that every program needs.
        variables: Vec<(String, String)>,
        /// The folder that it runs in.
        folder: Option<PathBuf>,
    },
    /// An address.
    Address {
        /// It.
        url: String,
        /// Headers of every request, for keys.
        headers: Vec<(String, String)>,
    },
}

/// One MCP server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerSpec {
    /// What it is called here.
    pub name: String,
    /// Where it is.
    pub location: Location,
    /// Whether somebody is asked before its tools are called.
    pub approval: Approval,
    /// The tools that are offered; none for all.
    pub only: Option<Vec<String>>,
}

impl ServerSpec {
    /// The servers that a word of the command line names.
    pub fn parse(given: &str) -> Result<Vec<ServerSpec>, SpecError> {
        let wrong = |why: String| SpecError { what: shown(given), why };
        let split = given.split_once('=').filter(|(name, _)| is_server_name(name));
        let (name, place) = match split {
            Some((name, place)) => (name.to_owned(), place.trim()),
            None if is_file(given) => return ServerSpec::of_file(Path::new(given)),
            None if is_address(given) => (name_of(given), given),
            None => return Err(wrong("it has no name: up to 24 letters, digits and - before a =".to_owned())),
        };
        let location = match is_address(place) {
            true => Location::Address { url: checked(place).map_err(wrong)?, headers: Vec::new() },
            false => {
                let mut words = words(place).map_err(wrong)?.into_iter();
                let program = words.next().filter(|word| !word.is_empty());
                let program = program.ok_or_else(|| wrong("there is no command".to_owned()))?;
                Location::Command { program, arguments: words.collect(), variables: Vec::new(), folder: None }
            }
        };
        Ok(vec![ServerSpec { name, location, approval: Approval::Ask, only: None }])
    }

    /// The servers of a file.
    fn of_file(path: &Path) -> Result<Vec<ServerSpec>, SpecError> {
        let wrong = |why: String| SpecError { what: shown(&path.to_string_lossy()), why };
        let text = std::fs::read_to_string(path).map_err(|why| wrong(why.to_string()))?;
        let value: Value = serde_json::from_str(&text).map_err(|why| wrong(why.to_string()))?;
        let servers = ["mcpServers", "servers"].into_iter().find_map(|key| value.get(key)?.as_object());
        let servers = servers.ok_or_else(|| wrong("it has no \"mcpServers\"".to_owned()))?;
        let used = servers.iter().filter(|(_, entry)| entry.get("disabled") != Some(&Value::Bool(true)));
        used.map(|(name, entry)| {
            ServerSpec::of_entry(name, entry, &variable).map_err(|why| wrong(format!("{}: {why}", shown(name))))
        })
        .collect()
    }

    fn of_entry(name: &str, entry: &Value, variable: &dyn Fn(&str) -> Option<String>) -> Result<ServerSpec, String> {
        // Names in files of other programs may have anything in them.
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(24).collect();
        if !is_server_name(&name) {
            return Err("it has no name".to_owned());
        }
        const KNOWN: [&str; 10] =
            ["type", "command", "args", "env", "cwd", "url", "headers", "approval", "tools", "disabled"];
        let object = entry.as_object().ok_or("it must be an object")?;
        if let Some(other) = object.keys().find(|key| !KNOWN.contains(&key.as_str())) {
            return Err(format!("{:?} is not known; there are {}", shown(other), KNOWN.join(", ")));
        }
        let text = |key: &str| match object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => expanded(text, variable).map(Some),
            Some(_) => Err(format!("{key:?} must be a text")),
        };
        let texts = |key: &str| match object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(list)) => {
                let one = |value: &Value| expanded(value.as_str().ok_or(format!("{key:?} must hold texts"))?, variable);
                list.iter().map(one).collect::<Result<Vec<_>, String>>().map(Some)
            }
            Some(_) => Err(format!("{key:?} must be a list")),
        };
        let pairs = |key: &str| match object.get(key) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Object(pairs)) => {
                let one = |(name, value): (&String, &Value)| {
                    let value = value.as_str().ok_or(format!("{key:?} must hold texts"))?;
                    Ok((name.clone(), expanded(value, variable)?))
                };
                pairs.iter().map(one).collect::<Result<Vec<_>, String>>()
            }
            Some(_) => Err(format!("{key:?} must be an object")),
        };
        let location = match (text("command")?, text("url")?) {
            (Some(program), None) => Location::Command {
                program,
                arguments: texts("args")?.unwrap_or_default(),
                variables: pairs("env")?,
                folder: text("cwd")?.map(PathBuf::from),
            },
            (None, Some(url)) => Location::Address { url: checked(&url)?, headers: pairs("headers")? },
            _ => return Err("it must have a \"command\" or a \"url\"".to_owned()),
        };
        if object.get("type").is_some_and(|kind| kind == "sse") {
            return Err(
                "the old transport \"sse\" is not spoken; most servers have a second address for \"http\"".to_owned()
            );
        }
        let approval = match text("approval")?.as_deref() {
            None | Some("ask") => Approval::Ask,
            Some("always") => Approval::Always,
            Some(other) => return Err(format!("\"approval\" is {other:?}; it must be ask or always")),
        };
        Ok(ServerSpec { name, location, approval, only: texts("tools")? })
    }
}

fn is_address(text: &str) -> bool {
    text.starts_with("http://") || text.starts_with("https://")
}

fn is_file(text: &str) -> bool {
    text.ends_with(".json") || (!is_address(text) && Path::new(text).is_file())
}

/// An address that may be asked.
fn checked(url: &str) -> Result<String, String> {
    let uri: ureq::http::Uri = url.parse().map_err(|why| format!("the address is wrong: {why}"))?;
    match uri.host() {
        Some(host) if !host.is_empty() && is_address(url) => Ok(url.to_owned()),
        _ => Err("the address must begin with http:// or https:// and name a host".to_owned()),
    }
}

/// A name for a server that has none: its host.
fn name_of(url: &str) -> String {
    let host = url.parse::<ureq::http::Uri>().ok().and_then(|uri| uri.host().map(str::to_owned)).unwrap_or_default();
    let name: String = host.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(24).collect();
    if is_server_name(&name) { name } else { "mcp".to_owned() }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// A text of a file with `${NAME}` taken from the environment, so that keys need not stand in the file.
fn expanded(text: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(start) = rest.find("${") {
        let end = rest[start..].find('}').ok_or("a ${ has no }")? + start;
        let name = &rest[start + 2..end];
        // Other programs write what they mean before a colon.
        let name = name.strip_prefix("env:").unwrap_or(name);
        out += &rest[..start];
        out += &variable(name).ok_or_else(|| format!("the variable {} is not set", shown(name)))?;
        rest = &rest[end + 1..];
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn one(given: &str) -> ServerSpec {
        ServerSpec::parse(given).unwrap().remove(0)
    }

    #[test]
    fn a_server_is_a_command_or_an_address() {
        let files = one("files=npx -y @modelcontextprotocol/server-filesystem '/my notes'");
        assert_eq!(files.name, "files");
        let Location::Command { program, arguments, .. } = files.location else { panic!("a command") };
        assert_eq!(program, "npx");
        assert_eq!(arguments, ["-y", "@modelcontextprotocol/server-filesystem", "/my notes"]);
        let web = one("web=http://127.0.0.1:9/mcp?key=a=b");
        assert_eq!(web.location, Location::Address { url: "http://127.0.0.1:9/mcp?key=a=b".into(), headers: vec![] });
        assert_eq!(one("https://tools.example/mcp").name, "tools-example");
        for (given, word) in [
            ("npx -y x", "has no name"),
            ("a_b=npx", "has no name"),
            ("a=", "no command"),
            ("a='npx", "has no end"),
            ("a=http://", "the address is wrong"),
            ("no/such.json", "No such file"),
            ("a\u{1b}[2J", "has no name"),
        ] {
            let why = ServerSpec::parse(given).unwrap_err().to_string();
            assert!(why.contains(word) && !why.contains('\u{1b}'), "{given}: {why}");
        }
    }

    #[test]
    fn files_of_other_programs_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mcp.json");
        let text = json!({"mcpServers": {
            "my files": {"command": "npx", "args": ["-y", "x"], "env": {"A": "b"}, "cwd": "/tmp", "tools": ["read"]},
            "web": {"type": "http", "url": "https://w.example/mcp", "headers": {"X-Key": "k"}, "approval": "always"},
            "off": {"command": "no", "disabled": true},
        }});
        std::fs::write(&path, text.to_string()).unwrap();
        let found = ServerSpec::parse(path.to_str().unwrap()).unwrap();
        assert_eq!(found.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>(), ["my-files", "web"]);
        assert_eq!(found[0].only, Some(vec!["read".to_owned()]));
        assert_eq!((found[0].approval, found[1].approval), (Approval::Ask, Approval::Always));
        std::fs::write(&path, r#"{"mcpServers": {"a": {"command": "x", "comand": "y"}}}"#).unwrap();
        let why = ServerSpec::parse(path.to_str().unwrap()).unwrap_err().to_string();
        assert!(why.contains("\"comand\" is not known"), "{why}");
        std::fs::write(&path, "{}").unwrap();
        assert!(ServerSpec::parse(path.to_str().unwrap()).is_err());
    }

    #[test]
    fn keys_come_from_the_environment() {
        let known = |name: &str| (name == "KEY").then(|| "s3cret".to_owned());
        assert_eq!(expanded("Bearer ${KEY}!", &known).unwrap(), "Bearer s3cret!");
        assert_eq!(expanded("${env:KEY}", &known).unwrap(), "s3cret");
        assert_eq!(expanded("$KEY", &known).unwrap(), "$KEY");
        assert!(expanded("${NO}", &known).unwrap_err().contains("NO is not set"));
        assert!(expanded("${KEY", &known).is_err());
        let wrong = ServerSpec::of_entry("a", &json!({"type": "sse", "url": "http://a/sse"}), &known);
        assert!(wrong.unwrap_err().contains("\"sse\""));
        assert!(ServerSpec::of_entry("a", &json!({"approval": "never", "command": "x"}), &known).is_err());
        assert!(ServerSpec::of_entry("", &json!({"command": "x"}), &known).is_err());
    }
}
