//! Loads and validates definitions for all commands: the built-in ones, overlaid with the user's directory.
#![forbid(unsafe_code)]

mod builtin;
mod error;
mod files;
mod needs;
mod site;
mod unused;
mod validate;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use error::Report;
pub use error::{DefinitionError, DefinitionErrors};
use farrier_core::{
    image::{Definitions, DriverImage, SourceOrigin},
    kernel::{AnnouncedKernels, KernelFamily},
    site::Site,
};
use farrier_local::blocking::blocking;
use farrier_yaml as yaml;
use farrier_yaml::{Node, YamlError};
pub use unused::unused_files;

/// Size limit of a definition file in bytes. The built-in ones have about 1 KiB.
const MAX_FILE: u64 = 1 << 20;

/// Size limit of a patch in bytes.
const MAX_PATCH: u64 = 64 << 20;

/// Maximum number of values in one file, including values reached through aliases. A definition has about fifty.
const MAX_VALUES: usize = 20_000;

/// A file of the definitions: its text, and its name in messages.
#[derive(Clone, Debug)]
struct File {
    name: String,
    text: String,
}

/// Loads the built-in definitions and overlays the ones in `dir`. Every mistake is reported, not only the first.
///
/// - Families: the directory's families come first, in file-name order, then the built-in ones that the directory does not
///   replace by file name.
/// - Templates: the directory's templates replace built-in ones of the same name.
/// - Images: only the directory's images if it has an `images/`, else the built-in ones.
/// - Announced kernels: only the directory's.
pub fn load(dir: Option<&Path>) -> Result<Definitions, DefinitionErrors> {
    let mut loader = Loader::default();
    if let Some(dir) = dir {
        if !dir.is_dir() {
            let message = "there is no such directory".to_owned();
            let error = DefinitionError::of_file(&dir.display().to_string(), message);
            return Err(DefinitionErrors(vec![error]));
        }
        report_misplaced(dir, &mut loader.errors);
        loader.definitions.root = dir.to_path_buf();
    }
    let mut files_in = |name: &str, extensions: &[&str]| match dir {
        Some(dir) => read_directory(dir, name, extensions, &mut loader.errors),
        None => None,
    };
    let own_images = files_in("images", &["yaml", "yml"]);
    let own_families = files_in("kernels", &["yaml", "yml"]).unwrap_or_default();
    let own_templates = files_in("templates", &["hbs"]).unwrap_or_default();
    let announced = files_in("announced", &["yaml", "yml"]).unwrap_or_default();
    let site = dir.and_then(|dir| {
        read_file(dir, SITE, &mut loader.errors).or_else(|| read_file(dir, MOUNTED_SITE, &mut loader.errors))
    });

    let images = own_images.unwrap_or_else(|| builtin::files(builtin::IMAGES, "images"));
    let mut families = builtin::files(builtin::KERNELS, "kernels");
    families.retain(|built_in| own_families.iter().all(|own| own.name != built_in.name));
    families.splice(0..0, own_families);
    let mut templates = builtin::files(builtin::TEMPLATES, "templates");
    templates.extend(own_templates);
    let patches = builtin::files(builtin::PATCHES, "patches").into_iter();
    loader.definitions.patches = patches.map(|file| (PathBuf::from(file.name), file.text)).collect();

    loader.add_templates(templates);
    let templates_are_valid = loader.errors.is_empty();
    loader.add_families(&families);
    loader.add_images(&images, templates_are_valid);
    loader.add_announced(&announced);
    if let Some(site) = &site {
        loader.add_site(site);
    }
    if loader.errors.is_empty() { Ok(loader.definitions) } else { Err(DefinitionErrors(loader.errors)) }
}

/// Definitions that are being loaded, with the mistakes found so far.
#[derive(Default)]
struct Loader {
    definitions: Definitions,
    names: validate::Names,
    errors: Vec<DefinitionError>,
}

impl Loader {
    /// Adds templates. A later template replaces an earlier one of the same name.
    fn add_templates(&mut self, files: Vec<File>) {
        for file in files {
            match template_name(&file.name) {
                Some(name) => {
                    self.errors.extend(validate::template(&file, name));
                    self.definitions.templates.insert(name.to_owned(), file.text);
                }
                None => self.errors.push(DefinitionError::of_file(&file.name, NOT_A_TEMPLATE.to_owned())),
            }
        }
    }

    fn add_families(&mut self, files: &[File]) {
        for file in files {
            for (family, document) in parse::<KernelFamily>(file, &mut self.errors) {
                let mut report = Report { file, document: &document, errors: &mut self.errors };
                self.names.claim(&mut report, "kernel family", &family.metadata.name);
                validate::family(&mut report, &family);
                self.definitions.families.push(KernelFamily { file: file.name.clone(), ..family });
            }
        }
    }

    /// Adds images. With valid templates, the images' templates are also rendered.
    fn add_images(&mut self, files: &[File], templates_are_valid: bool) {
        let Self { definitions, names, errors } = self;
        let mut parsed_images = Vec::new();
        let mut all_parsed = true;
        for file in files {
            let before = errors.len();
            let parsed = parse::<DriverImage>(file, errors);
            all_parsed &= errors.len() == before;
            for (image, document) in parsed {
                let mut report = Report { file, document: &document, errors };
                names.claim(&mut report, "driver image", &image.metadata.name);
                validate::image(&mut report, &image, &definitions.templates);
                if templates_are_valid {
                    validate::rendering(&mut report, &image, &definitions.templates);
                }
                for (index, source) in image.spec.sources.iter().enumerate() {
                    if let SourceOrigin::Path { path, .. } = &source.from {
                        let value_path = ["spec", "sources", &index.to_string(), "from", "path", "path"];
                        let key = (image.metadata.name.clone(), path.to_path_buf());
                        definitions.source_positions.insert(key, report.position(&value_path));
                    }
                }
                definitions.images.insert(image.metadata.name.clone(), image.clone());
                parsed_images.push(needs::ParsedImage { file, document, image });
            }
        }
        // If an image could not be parsed, this check would report the image as missing.
        if all_parsed {
            needs::check_all(&parsed_images, definitions, errors);
        }
    }

    fn add_announced(&mut self, files: &[File]) {
        for file in files {
            for (kernels, document) in parse::<AnnouncedKernels>(file, &mut self.errors) {
                let mut report = Report { file, document: &document, errors: &mut self.errors };
                self.names.claim(&mut report, "list of announced kernels", &kernels.metadata.name);
                self.definitions.announced.insert(kernels.metadata.name.clone(), kernels);
            }
        }
    }

    fn add_site(&mut self, file: &File) {
        let mut documents = parse::<Site>(file, &mut self.errors).into_iter();
        if let Some((site, document)) = documents.next() {
            let mut report = Report { file, document: &document, errors: &mut self.errors };
            site::network(&mut report, &site.spec);
            site::signing(&mut report, &site.spec);
            self.definitions.site = site.spec;
        }
        if documents.next().is_some() {
            let message = "holds more than one document".to_owned();
            self.errors.push(DefinitionError::of_file(&file.name, message));
        }
    }
}

/// Returns the file of a built-in image.
pub fn shipped_image(name: &str) -> Option<&'static str> {
    builtin::IMAGES.get_file(format!("{name}.yaml"))?.contents_utf8()
}

/// Reads a patch from the definitions directory, or the built-in one if the directory has none.
pub async fn read_patch(definitions: &Definitions, path: &Path) -> io::Result<Vec<u8>> {
    let (root, relative_path) = (definitions.root.clone(), path.to_owned());
    let own_patch = blocking(move || {
        files::read(&root, &relative_path, MAX_PATCH).map_err(|error| {
            io::Error::new(error.kind(), format!("cannot read {}: {error}", relative_path.display()))
        })
    });
    if let Some(own_patch) = own_patch.await? {
        return Ok(own_patch);
    }
    let built_in = definitions.patches.get(path).map(|patch| patch.clone().into_bytes());
    built_in.ok_or_else(|| {
        let message = format!("there is no {} in the definitions", path.display());
        io::Error::new(io::ErrorKind::NotFound, message)
    })
}

/// File with the settings of the whole site.
const SITE: &str = "site.yaml";
/// Path of `site.yaml` in a pod, where a ConfigMap is mounted as a separate directory.
const MOUNTED_SITE: &str = "site/site.yaml";

const NOT_A_TEMPLATE: &str = "is not a template: its name must be <name>.Dockerfile.hbs";

/// Returns the template's name: `kbuild` for `templates/kbuild.Dockerfile.hbs`.
fn template_name(file: &str) -> Option<&str> {
    file.strip_prefix("templates/")?.strip_suffix(".Dockerfile.hbs")
}

/// Reads the files of one directory in file-name order; `None` if the directory does not exist.
fn read_directory(
    root: &Path,
    name: &str,
    extensions: &[&str],
    errors: &mut Vec<DefinitionError>,
) -> Option<Vec<File>> {
    match names_in(&root.join(name)) {
        Ok(names) => {
            let names = names.iter().filter(|file| has_extension(file, extensions));
            Some(names.filter_map(|file| read_file(root, &format!("{name}/{file}"), errors)).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            errors.push(DefinitionError::of_file(name, format!("cannot be read: {error}")));
            None
        }
    }
}

/// Returns the sorted names in a directory. Hidden files are skipped.
fn names_in(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        if !name.starts_with('.') {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

fn has_extension(name: &str, extensions: &[&str]) -> bool {
    let extension = Path::new(name).extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| extensions.contains(&extension))
}

/// Reports definitions outside the directories that farrier reads. Without an error, farrier would silently use the built-in
/// ones.
fn report_misplaced(root: &Path, errors: &mut Vec<DefinitionError>) {
    let names = names_in(root).unwrap_or_default();
    for name in names.into_iter().filter(|name| has_extension(name, &["yaml", "yml"])) {
        // An unreadable file is not a definition.
        let Ok(Some(text)) = read_text(root, &name) else { continue };
        if name != SITE && text.lines().any(|line| line.starts_with("apiVersion: farrier.dev/")) {
            let message = "is not read here: driver images belong in images/, kernel families in kernels/, announced kernels in \
                           announced/, and settings in site.yaml";
            errors.push(DefinitionError::of_file(&name, message.to_owned()));
        }
    }
}

/// Reads one file; `None` if it does not exist or cannot be read. A file that cannot be read is reported.
fn read_file(root: &Path, name: &str, errors: &mut Vec<DefinitionError>) -> Option<File> {
    match read_text(root, name) {
        Ok(text) => Some(File { name: name.to_owned(), text: text? }),
        Err(error) => {
            errors.push(DefinitionError::of_file(name, format!("cannot be read: {error}")));
            None
        }
    }
}

fn read_text(root: &Path, name: &str) -> io::Result<Option<String>> {
    let Some(bytes) = files::read(root, Path::new(name), MAX_FILE)? else { return Ok(None) };
    let text = String::from_utf8(bytes).map_err(|error| {
        io::Error::new(io::ErrorKind::InvalidData, format!("it is not valid UTF-8: {}", error.utf8_error()))
    })?;
    Ok(Some(text))
}

/// Parses the documents of one file. Returns the valid definitions with their trees, and reports the other documents.
fn parse<T: for<'de> Deserialize<'de>>(file: &File, errors: &mut Vec<DefinitionError>) -> Vec<(T, Node)> {
    let mut definitions = Vec::new();
    let mut mistakes = Vec::new();
    match yaml::documents(&file.text).and_then(check_size) {
        Ok(documents) => {
            for document in documents {
                match yaml::decode(&document) {
                    Ok(definition) => definitions.push((definition, document)),
                    Err(in_document) => mistakes.extend(in_document),
                }
            }
        }
        Err(mistake) => mistakes.push(mistake),
    }
    errors.extend(mistakes.into_iter().map(|mistake| DefinitionError::at(file, mistake)));
    definitions
}

/// Limits the number of values. Aliases can expand a small file to a huge tree, and farrier traverses all of it.
fn check_size(documents: Vec<Node>) -> Result<Vec<Node>, YamlError> {
    let mut remaining = MAX_VALUES;
    for document in &documents {
        let message = || format!("there are more than {MAX_VALUES} values after alias expansion");
        remaining = remaining.checked_sub(document.size()).ok_or_else(|| document.error(message()))?;
    }
    Ok(documents)
}

#[cfg(test)]
mod shipped_tests;
#[cfg(test)]
mod tests;
