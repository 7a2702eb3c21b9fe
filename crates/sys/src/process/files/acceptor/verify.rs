//! Checks of the files that the tree needs, before anything is changed.

use crate::process::files::error::FilesError;
use crate::process::files::image::{Image, Kind, OpenFile};
use crate::process::files::kinds::{fingerprint, named_file};
use crate::process::rights::FileOpener;
use rustix::fs::FileType;

/// Checks that every named file of the image exists here with the expected properties.
pub fn verify(opener: &mut FileOpener, image: &Image) -> Result<(), FilesError> {
    let mut files = image.files.values();
    files.try_for_each(|file| verify_file(opener, file, false))
}

/// Checks one file; `is_final` is true if the donor's tree is stopped.
pub fn verify_file(
    opener: &mut FileOpener,
    file: &OpenFile,
    is_final: bool,
) -> Result<(), FilesError> {
    match &file.kind {
        Kind::Regular {
            path,
            fingerprint: Some(stamp),
            ..
        } => fingerprint::verify(opener, path, stamp, is_final),
        Kind::Regular {
            path,
            fingerprint: None,
            ..
        } => named_file::verify_type(path, FileType::RegularFile, "type"),
        Kind::Directory { path, .. } => named_file::verify_type(path, FileType::Directory, "type"),
        Kind::Device { path, device } => named_file::verify_device(path, *device),
        Kind::Inotify { watches } => watches.values().try_for_each(|watch| {
            let found = rustix::fs::stat(&*watch.path);
            let missing = |_| super::super::error::Refusal::Missing(watch.path.to_string());
            Ok(found.map(|_| ()).map_err(missing)?)
        }),
        _ => Ok(()),
    }
}
