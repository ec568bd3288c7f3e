//! One MCP server: connected to when it is needed, asked for its tools once, and again when it says that they have changed or after it has ended.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kiln_system::text::{beginning, shown};
use serde_json::{Value, json};

use super::content;
use super::http::Http;
use super::link::Link;
use super::rpc::Failure;
use super::spec::{Location, ServerSpec};
use super::stdio::{Program, Stdio};
use crate::limits::{Limits, Wait};
use crate::tool::{Output, Tool};

/// Versions of the protocol, the newest first. What Kiln uses of it is the same in all.
const VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];
/// Pages of a list of tools, and tools of a server.
const MOST_PAGES: usize = 32;
const MOST_TOOLS: usize = 128;
/// Bytes of a description that the model is told, and of a schema.
const MOST_DESCRIPTION: usize = 4 << 10;
const MOST_SCHEMA: usize = 32 << 10;
/// How long a server that failed is left alone.
const REST: Duration = Duration::from_secs(10);

/// What a server offers.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    /// Their names are the server's own; the toolbox gives them others.
    pub(crate) tools: Vec<Tool>,
    /// What is left out, and why.
    pub(crate) left_out: Vec<String>,
}

#[derive(Default)]
struct State {
    link: Option<Arc<dyn Link>>,
    listed: Option<Arc<Listed>>,
    /// When it failed last, and why.
    failed: Option<(Instant, String)>,
}

/// One server.
pub(crate) struct Client {
    spec: ServerSpec,
    limits: Limits,
    state: Mutex<State>,
}

impl Client {
    pub(crate) fn new(spec: ServerSpec, limits: Limits) -> Client {
        Client { spec, limits, state: Mutex::default() }
    }

    pub(crate) fn name(&self) -> &str {
        &self.spec.name
    }

    pub(crate) fn url(&self) -> Option<&str> {
        match &self.spec.location {
            Location::Address { url, .. } => Some(url),
            Location::Command { .. } => None,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its tools. What fails is told, and not tried again for a while.
    pub(crate) fn tools(&self) -> Result<Arc<Listed>, String> {
        let wait = Wait { until: Instant::now() + self.limits.call_time, cancelled: &|| false };
        let mut state = self.state();
        self.connect(&mut state, &wait)?;
        state.listed.clone().ok_or_else(|| "has no tools".to_owned())
    }

    /// Makes sure that there is a connection and a list of tools.
    fn connect(&self, state: &mut State, wait: &Wait<'_>) -> Result<Arc<dyn Link>, String> {
        if let Some(why) = state.link.as_ref().and_then(|link| link.end()) {
            log::warn!("the MCP server {} {why}", self.spec.name);
            (state.link, state.listed) = (None, None);
        }
        if let Some((when, why)) = &state.failed
            && when.elapsed() < REST
        {
            return Err(why.clone());
        }
        let has_changed = state.link.as_ref().is_some_and(|link| link.take_changed());
        if let (Some(link), Some(_), false) = (&state.link, &state.listed, has_changed) {
            return Ok(Arc::clone(link));
        }
        let made = || -> Result<(Arc<dyn Link>, Listed), Failure> {
            let link = match &state.link {
                Some(link) => Arc::clone(link),
                None => self.open(wait)?,
            };
            let listed = self.list(link.as_ref(), wait)?;
            Ok((link, listed))
        };
        match made() {
            Ok((link, listed)) => {
                log::info!("the MCP server {} has {} tools", self.spec.name, listed.tools.len());
                (state.link, state.listed, state.failed) = (Some(Arc::clone(&link)), Some(Arc::new(listed)), None);
                Ok(link)
            }
            Err(failure) => {
                let why = failure.to_string();
                log::warn!("the MCP server {} {why}", self.spec.name);
                (state.link, state.listed) = (None, None);
                if failure != Failure::Cancelled {
                    state.failed = Some((Instant::now(), why.clone()));
                }
                Err(why)
            }
        }
    }

    /// Connects, and agrees on how to speak.
    fn open(&self, wait: &Wait<'_>) -> Result<Arc<dyn Link>, Failure> {
        let link: Arc<dyn Link> = match &self.spec.location {
            Location::Command { program, arguments, variables, folder } => {
                let (name, most, folder) = (self.spec.name.as_str(), self.limits.received, folder.as_ref());
                Arc::new(Stdio::start(&Program { name, program, arguments, variables, folder, most })?)
            }
            Location::Address { url, headers } => Arc::new(Http::new(url, headers, self.limits.received)),
        };
        let hello = json!({
            "protocolVersion": VERSIONS[0], "capabilities": {},
            "clientInfo": {"name": "kiln", "version": env!("CARGO_PKG_VERSION")},
        });
        let answer = link.ask("initialize", &hello, wait)?;
        let version = answer.get("protocolVersion").and_then(Value::as_str).unwrap_or_default();
        if !VERSIONS.contains(&version) {
            let known = VERSIONS.join(", ");
            return Err(Failure::Wrong(format!("it speaks version {:?}; {known} are known", shown(version))));
        }
        link.speaks(version);
        link.tell("notifications/initialized", &json!({}))?;
        Ok(link)
    }

    fn list(&self, link: &dyn Link, wait: &Wait<'_>) -> Result<Listed, Failure> {
        let (mut listed, mut params) = (Listed::default(), json!({}));
        for _ in 0..MOST_PAGES {
            let page = link.ask("tools/list", &params, wait)?;
            let tools = page.get("tools").and_then(Value::as_array);
            let tools = tools.ok_or_else(|| Failure::Wrong("its list of tools is none".to_owned()))?;
            for value in tools {
                if listed.tools.len() >= MOST_TOOLS {
                    listed.left_out.push(format!("has more than {MOST_TOOLS} tools; the others are left out"));
                    return Ok(listed);
                }
                match self.tool(value) {
                    Ok(Some(tool)) => listed.tools.push(tool),
                    Ok(None) => {}
                    Err(why) => listed.left_out.push(why),
                }
            }
            listed.left_out.truncate(MOST_TOOLS);
            match page.get("nextCursor").and_then(Value::as_str) {
                Some(next) => params = json!({"cursor": next}),
                None => return Ok(listed),
            }
        }
        listed.left_out.push(format!("lists its tools on more than {MOST_PAGES} pages; the others are left out"));
        Ok(listed)
    }

    /// A tool as the server describes it; nothing where it is not to be offered.
    fn tool(&self, value: &Value) -> Result<Option<Tool>, String> {
        let name = value.get("name").and_then(Value::as_str).filter(|name| name.len() <= 1000);
        let name = name.ok_or("has a tool without a name, or with a very long one; it is left out")?;
        if self.spec.only.as_ref().is_some_and(|only| !only.iter().any(|one| one == name)) {
            return Ok(None);
        }
        let schema = value.get("inputSchema").filter(|schema| schema.is_object());
        let parameters = schema.cloned().unwrap_or_else(|| json!({"type": "object"}));
        let bytes = parameters.to_string().len();
        if bytes > MOST_SCHEMA {
            return Err(format!(
                "describes the arguments of {} in {bytes} bytes, at most {MOST_SCHEMA} are taken; it is left out",
                shown(name)
            ));
        }
        let text = |name: &str| value.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        let mut description = text("description").or(text("title")).unwrap_or_default().to_owned();
        if description.len() > MOST_DESCRIPTION {
            description.truncate(beginning(&description, MOST_DESCRIPTION).len());
            description += "...";
        }
        Ok(Some(Tool {
            name: name.to_owned(),
            server: self.spec.name.clone(),
            own_name: name.to_owned(),
            description,
            parameters,
            approval: self.spec.approval,
        }))
    }

    /// Calls a tool. It is not tried again: it may have done something.
    pub(crate) fn call(&self, tool: &str, arguments: &Value, wait: &Wait<'_>) -> Result<Output, String> {
        let named = |why: String| format!("the MCP server {} {why}", self.spec.name);
        let link = self.connect(&mut self.state(), wait).map_err(named)?;
        let result = link.ask("tools/call", &json!({"name": tool, "arguments": arguments}), wait);
        result.map(|result| content::output(&result)).map_err(|why| named(why.to_string()))
    }
}
