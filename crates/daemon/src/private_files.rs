//! Directories and files of the daemon alone: created without access for others, and opened without following links.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{Access, OFlags, access};

/// Mode bits with which a group or others may write.
const WRITABLE: u32 = 0o022;
const WRITABLE_BY_ALL: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// Creates a run directory if necessary, and checks it: a user that could replace files in it could impersonate the
/// daemon.
///
/// # Errors
/// The directory cannot be created; is a link or no directory; or is owned or writable by another user, as may be one
/// of its parents.
pub fn run_directory(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path).map_err(|error| with_path(path, &error))?;
    check_owners(path)
}

/// Checks without a change that [`run_directory`] can use a path: an existing directory as it does; of a directory
/// that it would create, the parent.
///
/// # Errors
/// As [`run_directory`].
pub fn check_directory(path: &Path) -> io::Result<()> {
    let mut ancestors = path.ancestors();
    let existing = ancestors.find(|ancestor| fs::symlink_metadata(ancestor).is_ok());
    let existing = existing.unwrap_or(Path::new("."));
    if existing == path {
        check_owners(path)?;
    } else if !existing.is_dir() {
        let text = format!("{}: not a directory", existing.display());
        return Err(io::Error::new(io::ErrorKind::NotADirectory, text));
    }
    access(existing, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|error| with_path(existing, &error.into()))
}

/// Checks that no other user may replace the directory or a file in it.
fn check_owners(path: &Path) -> io::Result<()> {
    check_permissions(path, WRITABLE)?;
    let canonical = path
        .canonicalize()
        .map_err(|error| with_path(path, &error))?;
    canonical.ancestors().skip(1).try_for_each(|parent| {
        let metadata = fs::symlink_metadata(parent).map_err(|error| with_path(parent, &error))?;
        // In a sticky directory such as /tmp, only the owner of an entry may replace it.
        let writable = if metadata.mode() & STICKY == 0 {
            WRITABLE_BY_ALL
        } else {
            0
        };
        check_permissions(parent, writable)
    })
}

/// Creates a directory that only this user can read. An existing directory that others can read is closed to them.
///
/// # Errors
/// As [`run_directory`].
pub fn private_directory(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder
        .create(path)
        .map_err(|error| with_path(path, &error))?;
    check_permissions(path, WRITABLE)?;
    fs::set_permissions(path, Permissions::from_mode(0o700))
        .map_err(|error| with_path(path, &error))
}

/// Returns options that open files for this user only, and refuse links.
pub fn private_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    let no_link = OFlags::NOFOLLOW.bits().cast_signed();
    options.mode(0o600).custom_flags(no_link);
    options
}

/// Replaces the file `path` by one with this content, durably: after a crash there is either the old file or the new one.
/// Only this user can read the file.
///
/// # Errors
/// The directory cannot be written, or the disk is full; the old file is then unchanged.
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let mut file = private_options()
        .write(true)
        .create(true)
        .truncate(true)
        .open(partial)
        .map_err(|error| with_path(partial, &error))?;
    let written = file.write_all(content).and_then(|()| file.sync_all());
    let renamed = written.and_then(|()| fs::rename(partial, path));
    if let Err(error) = renamed {
        // The error of the write counts.
        let _ = fs::remove_file(partial);
        return Err(with_path(path, &error));
    }
    fs::File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(|error| with_path(directory, &error))
}

fn check_permissions(path: &Path, writable: u32) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path).map_err(|error| with_path(path, &error))?;
    let uid = rustix::process::geteuid().as_raw();
    let problem = if !metadata.is_dir() {
        "the path is a link or not a directory".to_owned()
    } else if metadata.uid() != uid && metadata.uid() != 0 {
        format!("user {} owns it", metadata.uid())
    } else if metadata.mode() & writable & !own_group_write_bit(&metadata) != 0 {
        format!(
            "users other than its owner may write there (mode {:o})",
            metadata.mode() & 0o7777
        )
    } else {
        return Ok(());
    };
    let text = format!(
        "{}: {problem}; correct that, or configure another directory",
        path.display()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// Returns the group's write bit if the group is this user's.
fn own_group_write_bit(metadata: &fs::Metadata) -> u32 {
    match metadata.gid() == rustix::process::getegid().as_raw() {
        true => 0o020,
        false => 0,
    }
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    pub(crate) fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn private_directories_deny_others() {
        let folder = tempfile::tempdir().unwrap();
        let [new, open, writable, link] =
            ["new", "open", "writable", "link"].map(|name| folder.path().join(name));
        private_directory(&new).unwrap();
        assert_eq!(mode_of(&new), 0o700);
        fs::create_dir(&open).unwrap();
        set_mode(&open, 0o755);
        private_directory(&open).unwrap();
        assert_eq!(mode_of(&open), 0o700);
        fs::create_dir(&writable).unwrap();
        set_mode(&writable, 0o777);
        symlink(&new, &link).unwrap();
        for refused in [&writable, &link] {
            let error = private_directory(refused).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        }
    }

    #[test]
    fn checked_directory_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let (new, open, file) = (
            folder.path().join("run/below"),
            folder.path().join("open"),
            folder.path().join("file"),
        );
        check_directory(&new).unwrap();
        assert!(!folder.path().join("run").exists());
        fs::create_dir(&open).unwrap();
        set_mode(&open, 0o777);
        check_directory(&open).unwrap_err();
        assert_eq!(mode_of(&open), 0o777);
        fs::write(&file, "").unwrap();
        let error = check_directory(&file.join("below")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn private_files_refuse_links() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| folder.path().join(name));
        private_options()
            .write(true)
            .create(true)
            .open(&file)
            .unwrap();
        assert_eq!(mode_of(&file) & 0o077, 0);
        symlink(&file, &link).unwrap();
        let error = private_options().write(true).open(&link).unwrap_err();
        let expected = rustix::io::Errno::LOOP.raw_os_error();
        assert_eq!(error.raw_os_error(), Some(expected));
    }

    #[test]
    fn replaced_file_is_whole_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        for content in ["first", "second, which is longer", ""] {
            replace_file(&file, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), content);
            assert_eq!(mode_of(&file), 0o600);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        replace_file(&folder.path().join("missing/file"), b"").unwrap_err();
        // A directory cannot be replaced by a file.
        let directory = folder.path().join("directory");
        fs::create_dir(&directory).unwrap();
        replace_file(&directory, b"").unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn run_directory_writable_by_others_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("below");
        run_directory(&below).unwrap();
        // The parent directory.
        set_mode(folder.path(), 0o777);
        run_directory(&below).unwrap_err();
        set_mode(folder.path(), 0o1777);
        run_directory(&below).unwrap();
        set_mode(&below, 0o777);
        run_directory(&below).unwrap_err();
    }
}
