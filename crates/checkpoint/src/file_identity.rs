//! Identity of a file across two machines: the linker's build id, or a digest of the content if the file has none.

use super::error::{Context, Error, Result};
use super::file_rights::FileOpener;
use super::image::BackingFile;
use rustix::fs::OFlags;
use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};

/// Number of leading bytes of a file in which its program headers are searched. Also the most bytes read of one note
/// segment.
const HEADER_BYTES_MAX: usize = 1 << 16;
/// `PT_NOTE`.
const PT_NOTE: u32 = 4;
/// `NT_GNU_BUILD_ID`.
const NT_GNU_BUILD_ID: u32 = 3;

/// Returns the identity that a file under this path must have to be the same file.
pub(crate) fn identify(path: &[u8], file: &File) -> Result<BackingFile> {
    let name = || String::from_utf8_lossy(path).into_owned();
    let size = file.metadata().context(name)?.size();
    let build_id = build_id(file).unwrap_or_default();
    let digest = if build_id.is_empty() {
        content_digest(file).context(name)?
    } else {
        Vec::new()
    };
    Ok(BackingFile {
        path: path.to_vec(),
        size,
        build_id,
        digest,
    })
}

/// Opens the file of this machine that has the path and identity of the donor's file.
///
/// # Errors
/// [`Error::Refused`], with the path, if the file is missing or differs.
pub(crate) fn open_identical(wanted: &BackingFile, opener: &mut FileOpener) -> Result<File> {
    let path = std::path::Path::new(OsStr::from_bytes(&wanted.path));
    let refused = |why: String| Error::Refused(format!("{}: {why}", path.display()));
    let file = opener.open(path, OFlags::RDONLY);
    let file = file.map_err(|error| Error::Refused(opener.failure_reason(path, &error)))?;
    let file = File::from(file);
    let kind = file
        .metadata()
        .map_err(|error| refused(error.to_string()))?;
    if !kind.is_file() {
        return Err(refused("not a regular file here".to_owned()));
    }
    if identify(&wanted.path, &file)? != *wanted {
        return Err(refused("differs from the donor's file".to_owned()));
    }
    Ok(file)
}

fn content_digest(file: &File) -> std::io::Result<Vec<u8>> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        let count = file.read_at(&mut buffer, at)?;
        if count == 0 {
            return Ok(hash.finalize().to_vec());
        }
        hash.update(&buffer[..count]);
        at += count as u64;
    }
}

/// Returns the build id of a 64-bit ELF file, if the file has one.
fn build_id(file: &File) -> Option<Vec<u8>> {
    let mut head = Vec::new();
    let mut reader = OffsetReader { file, offset: 0 };
    (&mut reader)
        .take(HEADER_BYTES_MAX as u64)
        .read_to_end(&mut head)
        .ok()?;
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table = u64_at(&head, 32)? as usize;
    let entry = usize::from(u16_at(&head, 54)?);
    let count = usize::from(u16_at(&head, 56)?);
    (0..count).find_map(|number| {
        let header = head.get(table.checked_add(number.checked_mul(entry)?)?..)?;
        if u32_at(header, 0)? != PT_NOTE {
            return None;
        }
        let (offset, length) = (
            u64_at(header, 8)?,
            u64_at(header, 32)?.min(HEADER_BYTES_MAX as u64),
        );
        let mut notes = vec![0; length as usize];
        file.read_exact_at(&mut notes, offset).ok()?;
        find_note(&notes)
    })
}

fn find_note(mut notes: &[u8]) -> Option<Vec<u8>> {
    loop {
        let name_length = u32_at(notes, 0)? as usize;
        let length = u32_at(notes, 4)? as usize;
        let kind = u32_at(notes, 8)?;
        let content = 12 + name_length.checked_next_multiple_of(4)?;
        if kind == NT_GNU_BUILD_ID && notes.get(12..)?.starts_with(b"GNU\0") && length <= 64 {
            return notes
                .get(content..content.checked_add(length)?)
                .map(<[u8]>::to_vec);
        }
        notes = notes.get(content.checked_add(length.checked_next_multiple_of(4)?)?..)?;
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Reader that begins at offset 0 and leaves the file's own position alone.
struct OffsetReader<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for &mut OffsetReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.file.read_at(buffer, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn program_has_build_id_and_text_file_has_digest() {
        let program = std::fs::read_link("/proc/self/exe").expect("a path");
        let path = program.as_os_str().as_bytes();
        let of_program = identify(path, &File::open(&program).expect("opens")).expect("reads");
        assert!(!of_program.build_id.is_empty() && of_program.digest.is_empty());
        open_identical(&of_program, &mut FileOpener::default()).expect("the same");
        let other_file = BackingFile {
            size: of_program.size + 1,
            ..of_program
        };
        let refusal = open_identical(&other_file, &mut FileOpener::default())
            .expect_err("differs")
            .to_string();
        assert!(refusal.contains(&*program.to_string_lossy()), "{refusal}");

        let folder = tempfile();
        let text = folder.join("text");
        File::create(&text)
            .expect("creates")
            .write_all(b"one")
            .expect("writes");
        let of_text = identify(
            text.as_os_str().as_bytes(),
            &File::open(&text).expect("opens"),
        )
        .expect("reads");
        assert_eq!(of_text.digest.len(), 32);
        File::create(&text)
            .expect("creates")
            .write_all(b"two")
            .expect("writes");
        assert!(matches!(
            open_identical(&of_text, &mut FileOpener::default()),
            Err(Error::Refused(_))
        ));
        std::fs::remove_dir_all(folder).expect("removed");
    }

    fn tempfile() -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!("holdfast-identity-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    #[test]
    fn malformed_notes_give_no_build_id() {
        assert_eq!(find_note(&[0xff; 40]), None);
        assert_eq!(
            find_note(&[4, 0, 0, 0, 200, 0, 0, 0, 3, 0, 0, 0, b'G', b'N', b'U', 0, 1]),
            None
        );
    }
}
