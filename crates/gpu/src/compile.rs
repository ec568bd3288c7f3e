//! GLSL to SPIR-V at run time. Includes are resolved here, so that the whole text is known: it is what the cache key
//! is made of, and what error messages quote.

use std::borrow::Cow;
#[cfg(feature = "compiler")]
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[cfg(feature = "compiler")]
use glslang::{
    Compiler, CompilerOptions, ShaderInput, ShaderSource, ShaderStage, SourceLanguage, SpirvVersion, Target,
    VulkanVersion,
};

use kiln_system::{environment, text::shown};

use crate::{Error, Shader};

/// Deepest nesting of includes; Kiln's own go five deep.
const DEEPEST: usize = 32;
/// Most bytes of a shader's whole text; Kiln's own stay below a tenth of it.
const MOST_BYTES: usize = 4 << 20;
/// Longest compilation of a text that a user's folder had a part in. Macros that double each other would go on for years.
const LONGEST: Duration = Duration::from_secs(60);

/// Where shader texts come from: embedded ones, and a folder that overrides them.
#[derive(Clone, Debug)]
pub struct Sources {
    embedded: &'static [(&'static str, &'static str)],
    folder: Option<PathBuf>,
}

impl Sources {
    /// The embedded files, overridden by those in the folder named by `KILN_SHADER_DIR`.
    pub fn new(embedded: &'static [(&'static str, &'static str)]) -> Sources {
        Sources { embedded, folder: environment::path("KILN_SHADER_DIR") }
    }

    /// The embedded files, overridden by those in `folder`.
    pub fn with_folder(embedded: &'static [(&'static str, &'static str)], folder: Option<PathBuf>) -> Sources {
        Sources { embedded, folder }
    }

    /// Checks that the folder, if one is named, overrides at least one embedded file. A folder that overrides nothing was named by
    /// mistake, and the embedded files would be measured without a warning.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let wrong = |why: String| Err(Error::ShaderFolder { why });
        if !folder.is_dir() {
            return wrong(format!("{} is not a folder", shown(&folder.to_string_lossy())));
        }
        let mut files = Vec::new();
        shader_files(folder, Path::new(""), &mut files);
        let known = |file: &String| self.embedded.iter().any(|(name, _)| name == file);
        for file in files.iter().filter(|file| !known(file)) {
            // Files of other names may be new ones that an overriding one includes.
            let base = file.rsplit('/').next().unwrap_or_default();
            let meant = self.embedded.iter().find(|(name, _)| name.rsplit('/').next() == Some(base));
            if let Some((meant, _)) = meant {
                return wrong(format!("{} takes no file's place; was {meant} meant?", shown(file)));
            }
        }
        if !files.iter().any(known) {
            let folder = shown(&folder.to_string_lossy());
            return wrong(format!("no file in {folder} takes the place of one of Kiln's"));
        }
        files.iter().try_for_each(|file| self.get(file).map(drop))
    }

    /// A file's text: that of the folder, else the embedded one.
    fn get(&self, file: &str) -> Result<Option<Cow<'static, str>>, Error> {
        // Names that lead out of the folder are not overrides.
        let is_inside = Path::new(file).components().all(|part| matches!(part, std::path::Component::Normal(_)));
        if let Some(path) = self.folder.as_ref().filter(|_| is_inside).map(|folder| folder.join(file)) {
            match std::fs::read_to_string(&path) {
                // The compiler takes texts that end at the first zero.
                Ok(text) if text.contains('\0') => {
                    return Err(Error::ShaderFolder {
                        why: format!("{} is no text: a byte of it is zero", shown(file)),
                    });
                }
                Ok(text) => return Ok(Some(Cow::Owned(text))),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(Error::ShaderFolder { why: format!("{} cannot be read: {e}", shown(file)) }),
            }
        }
        Ok(self.embedded.iter().find(|(name, _)| *name == file).map(|(_, text)| Cow::Borrowed(*text)))
    }

    /// The whole text of a shader, includes and defines in place.
    pub(crate) fn expand(&self, shader: &Shader) -> Result<Text, Error> {
        let mut text = Text { body: String::new(), origin: Vec::new() };
        text.push("#version 450", "(generated)", 0);
        for (name, value) in &shader.defines {
            text.push(&format!("#define {name} {value}"), "(defines)", 0);
        }
        let mut seen = Vec::new();
        self.append(shader, shader.file, &mut text, &mut seen, 0)?;
        Ok(text)
    }

    fn append(
        &self,
        shader: &Shader,
        file: &str,
        text: &mut Text,
        seen: &mut Vec<String>,
        depth: usize,
    ) -> Result<(), Error> {
        let too_much = |why: String| Err(Error::Includes { name: shader.name.clone(), file: shown(file), why });
        if depth > DEEPEST {
            return too_much(format!("files include each other more than {DEEPEST} deep"));
        }
        if text.body.len() > MOST_BYTES {
            return too_much(format!("its text has more than {MOST_BYTES} bytes"));
        }
        if seen.iter().any(|s| s == file) {
            return Ok(()); // Every file is included once, but for `#include_again`.
        }
        seen.push(file.to_owned());
        if file == "params.glsl" {
            text.push(shader.params.trim_end(), file, 1);
            return Ok(());
        }
        if file == "formats.glsl" {
            return shader.formats.iter().try_for_each(|format| self.append(shader, format, text, seen, depth + 1));
        }
        let body = self.get(file)?.ok_or_else(|| Error::NoSource { name: shader.name.clone(), file: shown(file) })?;
        for (number, line) in body.lines().enumerate() {
            let directive = line.trim_start();
            if let Some(rest) = directive.strip_prefix("#include_again") {
                // A piece of a function that is written out several times.
                let file = rest.trim().trim_matches('"');
                seen.retain(|s| s != file);
                self.append(shader, file, text, seen, depth + 1)?;
            } else if let Some(rest) = directive.strip_prefix("#include") {
                self.append(shader, rest.trim().trim_matches('"'), text, seen, depth + 1)?;
            } else if !directive.starts_with("#version") {
                text.push(line, file, number + 1);
            }
        }
        Ok(())
    }
}

/// Shader files below a folder, by their path from it.
fn shader_files(root: &Path, below: &Path, files: &mut Vec<String>) {
    // A folder that leads into itself by a link has no end.
    if below.components().count() > DEEPEST {
        return;
    }
    for entry in std::fs::read_dir(root.join(below)).into_iter().flatten().flatten() {
        let path = below.join(entry.file_name());
        if root.join(&path).is_dir() {
            shader_files(root, &path, files);
        } else if path.extension().is_some_and(|e| e == "comp" || e == "glsl") {
            files.push(path.to_string_lossy().into_owned());
        }
    }
}

/// A shader's whole text, and for each line where it comes from.
pub(crate) struct Text {
    pub(crate) body: String,
    #[cfg_attr(not(feature = "compiler"), allow(dead_code, reason = "messages of the compiler quote it"))]
    origin: Vec<(String, usize)>,
}

impl Text {
    fn push(&mut self, line: &str, file: &str, number: usize) {
        self.body.push_str(line);
        self.body.push('\n');
        self.origin.push((file.to_owned(), number));
    }

    /// The compiler's messages, each with the file and the line it speaks of.
    #[cfg(feature = "compiler")]
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
                    let (file, what, line) = (shown(file), shown(what), shown(lines[at].trim()));
                    let _ = writeln!(out, "  {file}:{number}: {what}\n    {line}");
                }
                // The last line only counts the errors.
                _ if message.contains("compilation errors") => {}
                _ => {
                    let _ = writeln!(out, "  {}", shown(message));
                }
            }
        }
        if out.is_empty() { shown(log) } else { out }
    }
}

/// There is no compiler where there are no GPUs to compile for.
#[cfg(not(feature = "compiler"))]
pub(crate) fn compile(_: &str, _: &Text, _: bool) -> Result<Vec<u32>, Error> {
    Err(Error::CpuOnly)
}

/// Compiles a text for a device of Vulkan 1.3 (or 1.2).
#[cfg(feature = "compiler")]
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

/// As [`compile`], but gives up after a while where a user's folder may have given the text.
pub(crate) fn compile_in_time(sources: &Sources, name: &str, text: Text, vulkan_1_3: bool) -> Result<Vec<u32>, Error> {
    if sources.folder.is_none() {
        return compile(name, &text, vulkan_1_3);
    }
    let (sender, receiver) = std::sync::mpsc::channel();
    let own_name = name.to_owned();
    let work = move || drop(sender.send(compile(&own_name, &text, vulkan_1_3)));
    // Not waited for where it takes too long: nothing can stop the compiler but the end of the process.
    let started = std::thread::Builder::new().name("glsl".into()).stack_size(64 << 20).spawn(work);
    let failed = |messages: String| Error::Compile { name: name.to_owned(), messages };
    started.map_err(|e| failed(format!("  no thread for the compiler: {e}")))?;
    receiver.recv_timeout(LONGEST).unwrap_or_else(|_| {
        Err(failed(format!("  the compiler took more than {} s; do macros expand each other?", LONGEST.as_secs())))
    })
}

/// Compiles a shader without a device: for tests and for checking every variant.
pub fn compile_offline(sources: &Sources, shader: &Shader) -> Result<Vec<u32>, Error> {
    compile(&shader.name, &sources.expand(shader)?, true)
}

#[cfg(all(test, feature = "compiler"))]
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
        ("deep/deep.comp", "void main() {}\n"),
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

    /// Files of a folder that `KILN_SHADER_DIR` might name, and a word of what is said of it; none where it is used.
    type Folder = (&'static [(&'static str, &'static [u8])], Option<&'static str>);
    const FOLDERS: &[Folder] = &[
        (&[], Some("takes the place")),
        (&[("notes.txt", b"hello")], Some("takes the place")),
        (&[("good.comp.orig", b"")], Some("takes the place")),
        (&[("new.comp", b"")], Some("takes the place")),
        (&[("deep.comp", b"void main() {}")], Some("was deep/deep.comp meant?")),
        (&[("deep/deep.comp", b"\xff\xfe")], Some("deep/deep.comp cannot be read")),
        (&[("deep/deep.comp", b"#include \"new.glsl\""), ("new.glsl", b"")], None),
        (&[("part.glsl", b"#include_again \"part.glsl\"\n")], Some("32 deep")),
        (&[("part.glsl", b"#include_again \"a.glsl\""), ("a.glsl", b"#include_again \"part.glsl\"")], Some("32 deep")),
        (&[("part.glsl", b"#include \"../../etc/passwd\"\n")], Some("../../etc/passwd")),
        (&[("part.glsl", b"#include \"/etc/passwd\"\n")], Some("/etc/passwd")),
        (&[("part.glsl", b"#include \"\x1b[2J\"\n")], Some("\\u{1b}[2J")),
        (&[("part.glsl", b"#error \x1b[2J\n")], Some("part.glsl:1")),
        (&[("part.glsl", b"void part() { uint x = p.n; }\0\n")], Some("part.glsl is no text")),
        (&[("good.comp", b"")], Some("Missing entry point")),
    ];

    /// What is said of such a folder when it is looked at and when a kernel is made from it.
    fn said(folder: &Path) -> Result<(), String> {
        let sources = Sources::with_folder(FILES, Some(folder.to_owned()));
        sources.check().map_err(|e| e.to_string())?;
        compile_offline(&sources, &shader("good.comp")).map(drop).map_err(|e| e.to_string())
    }

    #[test]
    fn folders_that_change_nothing_or_cannot_be_used_are_errors() {
        for (files, word) in FOLDERS {
            let folder = tempfile::tempdir().unwrap();
            for (name, bytes) in *files {
                let path = folder.path().join(name);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, bytes).unwrap();
            }
            match (said(folder.path()), word) {
                (Ok(()), None) => {}
                (Err(error), Some(word)) if error.contains(word) => {
                    assert!(!error.contains('\x1b'), "{files:?}: {error:?}");
                }
                (result, _) => panic!("{files:?}: {word:?} was wanted, not {result:?}"),
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.comp");
        std::fs::write(&file, "void main() {}").unwrap();
        for no_folder in [&folder.path().join("gone"), &file] {
            assert!(said(no_folder).unwrap_err().contains("is not a folder"));
        }
    }

    #[test]
    fn files_that_grow_without_end_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("half.glsl"), "x".repeat(1 << 20)).unwrap();
        std::fs::write(folder.path().join("part.glsl"), "#include_again \"half.glsl\"\n".repeat(9)).unwrap();
        let wide = said(folder.path()).unwrap_err();
        assert!(wide.contains("4194304 bytes"), "{wide}");
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
