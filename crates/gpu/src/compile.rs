//! GLSL to SPIR-V at run time. Includes are resolved here, so that the whole text is known: it is what the cache key
//! is made of, and what error messages quote.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::PathBuf;

use glslang::{
    Compiler, CompilerOptions, ShaderInput, ShaderSource, ShaderStage, SourceLanguage, SpirvVersion, Target,
    VulkanVersion,
};

use crate::{Error, Shader};

/// Where shader texts come from: embedded ones, and a folder that overrides them.
#[derive(Clone, Debug)]
pub struct Sources {
    embedded: &'static [(&'static str, &'static str)],
    folder: Option<PathBuf>,
}

impl Sources {
    /// The embedded files, overridden by those in the folder named by `KILN_SHADER_DIR`.
    pub fn new(embedded: &'static [(&'static str, &'static str)]) -> Sources {
        Sources { embedded, folder: std::env::var_os("KILN_SHADER_DIR").map(PathBuf::from) }
    }

    /// The embedded files, overridden by those in `folder`.
    pub fn with_folder(embedded: &'static [(&'static str, &'static str)], folder: Option<PathBuf>) -> Sources {
        Sources { embedded, folder }
    }

    fn get(&self, file: &str) -> Option<Cow<'static, str>> {
        let overridden = self.folder.as_ref().and_then(|dir| std::fs::read_to_string(dir.join(file)).ok());
        let embedded = || self.embedded.iter().find(|(name, _)| *name == file).map(|(_, text)| Cow::Borrowed(*text));
        overridden.map(Cow::Owned).or_else(embedded)
    }

    /// The whole text of a shader, includes and defines in place.
    pub(crate) fn expand(&self, shader: &Shader) -> Result<Text, Error> {
        let mut text = Text { body: String::new(), origin: Vec::new() };
        text.push("#version 450", "(generated)", 0);
        for (name, value) in &shader.defines {
            text.push(&format!("#define {name} {value}"), "(defines)", 0);
        }
        let mut seen = Vec::new();
        self.append(shader, shader.file, &mut text, &mut seen)?;
        Ok(text)
    }

    fn append(&self, shader: &Shader, file: &str, text: &mut Text, seen: &mut Vec<String>) -> Result<(), Error> {
        if seen.iter().any(|s| s == file) {
            return Ok(()); // Every file is included once, but for `#include_again`.
        }
        seen.push(file.to_owned());
        if file == "params.glsl" {
            text.push(shader.params.trim_end(), file, 1);
            return Ok(());
        }
        if file == "formats.glsl" {
            return shader.formats.iter().try_for_each(|format| self.append(shader, format, text, seen));
        }
        let body =
            self.get(file).ok_or_else(|| Error::NoSource { name: shader.name.clone(), file: file.to_owned() })?;
        for (number, line) in body.lines().enumerate() {
            let directive = line.trim_start();
            if let Some(rest) = directive.strip_prefix("#include_again") {
                // A piece of a function that is written out several times.
                let file = rest.trim().trim_matches('"');
                seen.retain(|s| s != file);
                self.append(shader, file, text, seen)?;
            } else if let Some(rest) = directive.strip_prefix("#include") {
                self.append(shader, rest.trim().trim_matches('"'), text, seen)?;
            } else if !directive.starts_with("#version") {
                text.push(line, file, number + 1);
            }
        }
        Ok(())
    }
}

/// A shader's whole text, and for each line where it comes from.
pub(crate) struct Text {
    pub(crate) body: String,
    origin: Vec<(String, usize)>,
}

impl Text {
    fn push(&mut self, line: &str, file: &str, number: usize) {
        self.body.push_str(line);
        self.body.push('\n');
        self.origin.push((file.to_owned(), number));
    }

    /// The compiler's messages, each with the file and the line it speaks of.
    fn annotate(&self, log: &str) -> String {
        let lines: Vec<&str> = self.body.lines().collect();
        let mut out = String::new();
        for message in log.lines().map(str::trim).filter(|l| l.starts_with("ERROR")) {
            // "ERROR: 0:12: 'x' : undeclared identifier"
            let mut parts = message.splitn(4, ':').map(str::trim);
            let (number, what) = (parts.nth(2).and_then(|n| n.parse::<usize>().ok()), parts.next());
            match (number.and_then(|n| n.checked_sub(1)), what) {
                (Some(at), Some(what)) if at < lines.len() => {
                    let (file, number) = &self.origin[at];
                    let _ = writeln!(out, "  {file}:{number}: {what}\n    {}", lines[at].trim());
                }
                // The last line only counts the errors.
                _ if message.contains("compilation errors") => {}
                _ => {
                    let _ = writeln!(out, "  {message}");
                }
            }
        }
        if out.is_empty() { log.to_owned() } else { out }
    }
}

/// Compiles a text for a device of Vulkan 1.3 (or 1.2).
pub(crate) fn compile(name: &str, text: &Text, vulkan_1_3: bool) -> Result<Vec<u32>, Error> {
    let failed = |log: String| Error::Compile { name: name.to_owned(), messages: text.annotate(&log) };
    let compiler = Compiler::acquire().ok_or_else(|| failed("the GLSL compiler did not start".into()))?;
    let source = ShaderSource::from(text.body.clone());
    let (version, spirv_version) = if vulkan_1_3 {
        (VulkanVersion::Vulkan1_3, SpirvVersion::SPIRV1_6)
    } else {
        (VulkanVersion::Vulkan1_2, SpirvVersion::SPIRV1_5)
    };
    let options = CompilerOptions {
        source_language: SourceLanguage::GLSL,
        target: Target::Vulkan { version, spirv_version },
        ..CompilerOptions::default()
    };
    let no_defines: Option<&[(&str, Option<&str>)]> = None;
    let input = ShaderInput::new(&source, ShaderStage::Compute, &options, no_defines, None)
        .map_err(|e| failed(e.to_string()))?;
    let shader = compiler.create_shader(input).map_err(|e| failed(e.to_string()))?;
    shader.compile().map_err(|e| failed(e.to_string()))
}

/// Compiles a shader without a device: for tests and for checking every variant.
pub fn compile_offline(sources: &Sources, shader: &Shader) -> Result<Vec<u32>, Error> {
    compile(&shader.name, &sources.expand(shader)?, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: &[(&str, &str)] = &[
        ("good.comp", "#version 450\n#include \"part.glsl\"\nlayout(local_size_x = WG) in;\nvoid main() { part(); }\n"),
        ("part.glsl", "#include \"params.glsl\"\nvoid part() { uint x = p.n; }\n"),
        ("bad.comp", "#include \"part.glsl\"\nlayout(local_size_x = 1) in;\n\nvoid main() {\n  part(oops);\n}\n"),
        ("missing.comp", "#include \"nowhere.glsl\"\n"),
        (
            "twice.comp",
            "#include \"part.glsl\"\n#include \"part.glsl\"\nvoid main() {\n#include_again \"step.glsl\"\n#include_again \"step.glsl\"\n}\n",
        ),
        ("step.glsl", "part();\n"),
    ];
    const PARAMS: &str = "layout(push_constant) uniform Params { uint n; } p;\n";

    fn shader(file: &'static str) -> Shader {
        Shader::new("test", file, PARAMS.into()).define("WG", 8)
    }

    #[test]
    fn includes_defines_and_parameters_come_together() {
        let spirv = compile_offline(&Sources::with_folder(FILES, None), &shader("good.comp")).unwrap();
        assert_eq!(spirv[0], 0x0723_0203);
    }

    #[test]
    fn files_come_once_or_as_often_as_they_are_asked_for() {
        let text = Sources::with_folder(FILES, None).expand(&shader("twice.comp")).unwrap().body;
        assert_eq!(text.matches("void part()").count(), 1, "{text}");
        assert_eq!(text.matches("part();").count(), 2, "{text}");
    }

    #[test]
    fn an_error_names_the_file_the_line_and_quotes_it() {
        let error = compile_offline(&Sources::with_folder(FILES, None), &shader("bad.comp")).unwrap_err().to_string();
        assert!(error.contains("bad.comp:5: 'oops' : undeclared identifier\n    part(oops);"), "{error}");
    }

    #[test]
    fn a_missing_include_is_named() {
        let error = compile_offline(&Sources::with_folder(FILES, None), &shader("missing.comp")).unwrap_err();
        assert!(error.to_string().contains("nowhere.glsl"), "{error}");
    }

    #[test]
    fn a_folder_overrides_embedded_files() {
        let folder = std::env::temp_dir().join(format!("kiln-shader-dir-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("part.glsl"), "void part() { broken }\n").unwrap();
        let sources = Sources::with_folder(FILES, Some(folder.clone()));
        let error = compile_offline(&sources, &shader("good.comp")).unwrap_err().to_string();
        std::fs::remove_dir_all(folder).unwrap();
        assert!(error.contains("part.glsl:1"), "{error}");
    }
}
