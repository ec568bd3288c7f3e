//! The tools that Kiln has itself. They read and compute, and change nothing.

mod calculator;
mod folder;

use std::path::Path;

use serde_json::{Value, json};

use self::folder::Folder;
use crate::tool::{Approval, Output, Tool};

/// Those that were asked for.
pub(crate) struct Builtin {
    calculator: bool,
    folder: Option<Folder>,
    /// Bytes of a file that are read at once.
    most: usize,
}

fn tool(name: &str, description: &str, properties: Value, required: &[&str]) -> Tool {
    Tool {
        name: name.to_owned(),
        server: String::new(),
        own_name: name.to_owned(),
        description: description.to_owned(),
        parameters: json!({"type": "object", "properties": properties, "required": required}),
        // They change nothing, and show nothing but what the operator named.
        approval: Approval::Always,
    }
}

impl Builtin {
    pub(crate) fn new(calculator: bool, folder: Option<&Path>, most: usize) -> std::io::Result<Builtin> {
        Ok(Builtin { calculator, folder: folder.map(Folder::open).transpose()?, most })
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.calculator && self.folder.is_none()
    }

    pub(crate) fn tools(&self) -> Vec<Tool> {
        let mut tools = Vec::new();
        if self.calculator {
            tools.push(tool(
                "calculator",
                "Computes an arithmetic expression: + - * / % ^, parentheses, pi, e, and the functions sqrt, abs, exp, ln, log10, log2, \
                 sin, cos, tan, asin, acos, atan (radians), floor, ceil, round, min, max.",
                json!({"expression": {"type": "string", "description": "For example (3 + 4) * sqrt(2)"}}),
                &["expression"],
            ));
        }
        if self.folder.is_some() {
            let path = |what: &str| json!({"type": "string", "description": what});
            tools.push(tool(
                "list_files",
                "Lists the files and folders of the folder that the user shares.",
                json!({"path": path("A folder within it; empty for the folder itself")}),
                &[],
            ));
            tools.push(tool(
                "read_file",
                "Reads a text file of the folder that the user shares.",
                json!({
                    "path": path("The file, as list_files names it"),
                    "offset": {"type": "integer", "description": "The byte to begin at, for long files", "minimum": 0},
                }),
                &["path"],
            ));
        }
        tools
    }

    pub(crate) fn call(&self, name: &str, arguments: &Value) -> Output {
        let text = |name: &str| arguments.get(name).and_then(Value::as_str);
        let done = match (name, &self.folder) {
            ("calculator", _) => match text("expression") {
                Some(expression) => calculator::compute(expression),
                None => Err("`expression` is missing".to_owned()),
            },
            ("list_files", Some(folder)) => folder.list(text("path").unwrap_or_default()),
            ("read_file", Some(folder)) => match text("path") {
                Some(path) => {
                    folder.read(path, arguments.get("offset").and_then(Value::as_u64).unwrap_or(0), self.most)
                }
                None => Err("`path` is missing".to_owned()),
            },
            _ => Err(format!("there is no tool {name}")),
        };
        done.map_or_else(Output::error, Output::text)
    }
}
