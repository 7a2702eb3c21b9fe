//! The input of the checks: the checkout's files and its packages, read once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// The checkout. Paths are relative to its root, with `/` between their parts.
#[derive(Debug, Default)]
pub struct SourceTree {
    /// Path of the checkout; empty in tests.
    pub root: PathBuf,
    /// Every file that git tracks or would track, with its text; `None` if it is not UTF-8.
    pub files: BTreeMap<String, Option<String>>,
    /// The workspace's packages.
    pub packages: Vec<Package>,
}

/// A package of the workspace.
#[derive(Debug, Clone, Default)]
pub struct Package {
    /// The package's name in cargo: `holdfast-wire`.
    pub name: String,
    /// The package's folder: `crates/wire`.
    pub dir: String,
    /// The packages of the workspace that it depends on.
    pub dependencies: Vec<Dependency>,
    /// The root files of its libraries, programs and examples, without tests and build scripts.
    pub roots: Vec<String>,
}

/// A dependency on another package of the workspace.
#[derive(Debug, Clone)]
pub struct Dependency {
    /// The other package.
    pub name: String,
    /// True if only tests, examples and benchmarks use the dependency.
    pub dev: bool,
}

impl SourceTree {
    /// Reads the checkout around the current directory.
    pub fn read() -> Result<SourceTree> {
        let metadata: Metadata =
            serde_json::from_slice(&run_for_output(Command::new("cargo").args([
                "metadata",
                "--format-version=1",
                "--no-deps",
                "--offline",
            ]))?)?;
        let root = PathBuf::from(&metadata.workspace_root);
        let mut files = BTreeMap::new();
        for path in list_files(&root)? {
            // A listed file may have been deleted without being staged; a link or a submodule is not a file.
            if root.join(&path).is_file() {
                let bytes = std::fs::read(root.join(&path)).with_context(|| path.clone())?;
                files.insert(path, String::from_utf8(bytes).ok());
            }
        }
        let packages = metadata.packages(&root);
        Ok(SourceTree {
            root,
            files,
            packages,
        })
    }

    /// Returns the text files with a path for which `wanted` returns true, with their text.
    pub fn texts<'a>(
        &'a self,
        wanted: impl Fn(&str) -> bool + 'a,
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files.iter().filter_map(move |(path, text)| {
            let text = text.as_deref()?;
            wanted(path).then_some((path.as_str(), text))
        })
    }

    /// Returns the package with the folder that contains `path`.
    pub fn package_of(&self, path: &str) -> Option<&Package> {
        let contains_path = |package: &&Package| {
            path.strip_prefix(&package.dir)
                .is_some_and(|rest| rest.starts_with('/'))
        };
        self.packages
            .iter()
            .filter(contains_path)
            .max_by_key(|package| package.dir.len())
    }
}

/// Returns tracked files and files that would be tracked: a new file is checked before it is committed.
fn list_files(root: &Path) -> Result<Vec<String>> {
    // The checkout may belong to another user, for whom root runs this program.
    let safe_directory = format!("safe.directory={}", root.display());
    let listing = run_for_output(Command::new("git").current_dir(root).args([
        "-c",
        &safe_directory,
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    let paths = listing
        .split(|byte| *byte == 0)
        .filter(|path| !path.is_empty());
    Ok(paths
        .map(|path| String::from_utf8_lossy(path).into_owned())
        .collect())
}

fn run_for_output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(output.stdout)
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<MetadataPackage>,
    workspace_root: String,
}

#[derive(Deserialize)]
struct MetadataPackage {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<MetadataDependency>,
    targets: Vec<MetadataTarget>,
}

#[derive(Deserialize)]
struct MetadataDependency {
    name: String,
    kind: Option<String>,
}

#[derive(Deserialize)]
struct MetadataTarget {
    kind: Vec<String>,
    src_path: PathBuf,
}

impl Metadata {
    fn packages(&self, root: &Path) -> Vec<Package> {
        let is_workspace_member =
            |name: &str| self.packages.iter().any(|package| package.name == name);
        let package = |package: &MetadataPackage| Package {
            name: package.name.clone(),
            dir: package
                .manifest_path
                .parent()
                .map(|dir| relative_path(root, dir))
                .unwrap_or_default(),
            dependencies: (package.dependencies.iter())
                .filter(|dependency| is_workspace_member(&dependency.name))
                .map(|dependency| Dependency {
                    name: dependency.name.clone(),
                    dev: dependency.kind.as_deref() == Some("dev"),
                })
                .collect(),
            roots: (package.targets.iter())
                .filter(|target| {
                    !target
                        .kind
                        .iter()
                        .any(|kind| kind == "test" || kind == "custom-build")
                })
                .map(|target| relative_path(root, &target.src_path))
                .collect(),
        };
        self.packages.iter().map(package).collect()
    }
}

fn relative_path(root: &Path, path: &Path) -> String {
    path.strip_prefix(root)
        .unwrap_or(path)
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_belongs_to_innermost_package() {
        let package = |dir: &str| Package {
            name: dir.into(),
            dir: dir.into(),
            ..Package::default()
        };
        let tree = SourceTree {
            packages: vec![package("crates/wire"), package("crates/wire/fuzz")],
            ..SourceTree::default()
        };
        let owner = |path| tree.package_of(path).map(|package| package.dir.as_str());
        assert_eq!(owner("crates/wire/src/lib.rs"), Some("crates/wire"));
        assert_eq!(
            owner("crates/wire/fuzz/src/main.rs"),
            Some("crates/wire/fuzz")
        );
        assert_eq!(owner("crates/wireless/src/lib.rs"), None);
    }

    #[test]
    fn checkout_can_be_read() {
        let tree = SourceTree::read().expect("git and cargo describe the checkout");
        assert!(tree.files.contains_key("xtask/src/source_tree.rs"));
        let xtask = tree
            .package_of("xtask/src/source_tree.rs")
            .expect("xtask is a package");
        assert_eq!(xtask.roots, ["xtask/src/main.rs"]);
    }
}
