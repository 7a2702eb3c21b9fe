//! Checks of the files that the tree needs, before anything is changed.

use crate::file_rights::FileOpener;
use crate::files::error::FilesError;
use crate::files::image::{FilesImage, OpenFile, OpenFileKind};
use crate::files::kinds::{fingerprint, named_file};
use rustix::fs::FileType;

/// Checks that every named file of the image exists here with the expected properties.
pub fn verify(opener: &mut FileOpener, image: &FilesImage) -> Result<(), FilesError> {
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
        OpenFileKind::Regular {
            path,
            fingerprint: Some(stamp),
            ..
        } => fingerprint::verify(opener, path, stamp, is_final),
        OpenFileKind::Regular {
            path,
            fingerprint: None,
            ..
        } => named_file::verify_type(path, FileType::RegularFile, "type"),
        OpenFileKind::Directory { path, .. } => {
            named_file::verify_type(path, FileType::Directory, "type")
        }
        OpenFileKind::Device { path, device } => named_file::verify_device(path, *device),
        OpenFileKind::Inotify { watches } => watches.values().try_for_each(|watch| {
            let found = rustix::fs::stat(&*watch.path);
            let missing = |_| super::super::error::FilesRefusal::Missing(watch.path.to_string());
            Ok(found.map(|_| ()).map_err(missing)?)
        }),
        _ => Ok(()),
    }
}
