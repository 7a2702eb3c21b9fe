//! A body being received: counted, hashed, and optionally written to a file. The hash's state is part of the
//! connection's state, so that a digest covers bytes received by several nodes.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::digest::common::hazmat::{SerializableState, SerializedState};
use sha2::{Digest, Sha256};

use crate::chunked::Chunked;
use crate::synthetic::hex;

/// Maximum size of one read if the end of a body is unknown, in bytes: well below the maximum state of a handoff.
const CHUNKED_READ_BYTES: usize = 32 * 1024;

/// The framing that determines the end of a body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Framing {
    /// The number of bytes left.
    Length(u64),
    /// The chunked coding.
    Chunked(Chunked),
}

/// The destination file, written under a temporary name in the same directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Destination {
    /// The temporary path.
    pub partial: PathBuf,
    /// The final path.
    pub name: PathBuf,
}

/// The state of an upload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upload {
    /// The framing of the body.
    pub framing: Framing,
    /// The destination file; none to compute only the digest.
    pub destination: Option<Destination>,
    /// Number of bytes received.
    pub received: u64,
    /// SHA-256 state over these bytes.
    #[serde(with = "serde_bytes")]
    hash: Vec<u8>,
}

/// An upload in progress.
pub struct Receiver {
    upload: Upload,
    hash: Sha256,
    file: Option<File>,
}

/// The reason that an upload ends early.
#[derive(Debug)]
pub enum Failure {
    /// The client sent invalid data.
    Malformed,
    /// Storing the data failed.
    Storage(io::Error),
}

impl Upload {
    /// Creates the state of a new upload.
    pub fn new(framing: Framing, destination: Option<Destination>) -> Self {
        Self {
            framing,
            destination,
            received: 0,
            hash: Sha256::new().serialize().to_vec(),
        }
    }

    /// Opens the destination and restores the hash.
    ///
    /// # Errors
    /// Same as open(2); `InvalidData` for an invalid hash state.
    pub fn open(self, root: Option<&Path>) -> io::Result<Receiver> {
        let state =
            SerializedState::<Sha256>::try_from(self.hash.as_slice()).map_err(io::Error::other)?;
        let hash = Sha256::deserialize(&state).map_err(io::Error::other)?;
        let file = match (&self.destination, root) {
            (Some(destination), Some(root)) => {
                let path = root.join(&destination.partial);
                Some(
                    OpenOptions::new()
                        .write(true)
                        .create(true)
                        .truncate(false)
                        .open(path)?,
                )
            }
            (Some(_), None) => return Err(io::ErrorKind::NotFound.into()),
            (None, _) => None,
        };
        Ok(Receiver {
            upload: self,
            hash,
            file,
        })
    }
}

impl Receiver {
    /// Returns the current state.
    pub fn save(&self) -> Upload {
        Upload {
            hash: self.hash.serialize().to_vec(),
            ..self.upload.clone()
        }
    }

    /// Returns true if the body is complete.
    pub fn is_done(&self) -> bool {
        matches!(
            self.upload.framing,
            Framing::Length(0) | Framing::Chunked(Chunked::Done)
        )
    }

    /// Returns the size of the next read, at most `most` bytes: not far beyond the body, because data after the body
    /// travels with the state.
    pub fn next_read_bytes(&self, most: usize) -> usize {
        match self.upload.framing {
            Framing::Length(left) => usize::try_from(left).map_or(most, |left| left.min(most)),
            Framing::Chunked(_) => most.min(CHUNKED_READ_BYTES),
        }
    }

    /// Consumes the part of `input` that belongs to the body; returns its length.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn feed(&mut self, input: &[u8]) -> Result<usize, Failure> {
        let mut data = Vec::new();
        let used = match &mut self.upload.framing {
            Framing::Length(left) => {
                let length =
                    usize::try_from(*left).map_or(input.len(), |left| left.min(input.len()));
                *left -= length as u64;
                data.extend(&input[..length]);
                length
            }
            Framing::Chunked(chunked) => chunked
                .feed(input, |bytes| data.extend(bytes))
                .map_err(|_| Failure::Malformed)?,
        };
        self.hash.update(&data);
        if let Some(file) = &self.file {
            file.write_all_at(&data, self.upload.received)
                .map_err(Failure::Storage)?;
        }
        self.upload.received += data.len() as u64;
        Ok(used)
    }

    /// Moves the file to its final path; returns the digest and the number of bytes.
    ///
    /// # Errors
    /// Same as rename(2).
    pub fn finish(self, root: Option<&Path>) -> io::Result<(String, u64)> {
        if let (Some(destination), Some(root), Some(file)) =
            (&self.upload.destination, root, &self.file)
        {
            file.set_len(self.upload.received)?;
            fs::rename(
                root.join(&destination.partial),
                root.join(&destination.name),
            )?;
        }
        Ok((hex(&self.hash.finalize()), self.upload.received))
    }

    /// Removes the temporary file.
    pub fn abandon(self, root: Option<&Path>) {
        if let (Some(destination), Some(root)) = (&self.upload.destination, root) {
            let _ = fs::remove_file(root.join(&destination.partial));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_covers_bytes_received_by_several_nodes() {
        let root = tempfile::tempdir().unwrap();
        let destination = Destination {
            partial: ".partial".into(),
            name: "name".into(),
        };
        let mut body = vec![0; 10_000];
        crate::synthetic::fill(0, &mut body);
        let mut upload = Upload::new(Framing::Length(10_000), Some(destination));
        for part in body.chunks(777) {
            let mut receiver = upload.open(Some(root.path())).unwrap();
            assert_eq!(receiver.feed(part).unwrap(), part.len());
            let bytes = postcard::to_allocvec(&receiver.save()).unwrap();
            upload = postcard::from_bytes(&bytes).unwrap();
        }
        let receiver = upload.open(Some(root.path())).unwrap();
        assert!(receiver.is_done());
        assert_eq!(
            receiver.finish(Some(root.path())).unwrap(),
            (crate::synthetic::sha256(10_000), 10_000)
        );
        assert_eq!(fs::read(root.path().join("name")).unwrap(), body);
        assert!(!root.path().join(".partial").exists());
    }
}
