//! Memory pages of a tree, in messages of limited size.

use super::{MESSAGE_MAX, validate};
use crate::process::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Pages of one message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// Page ranges, in the order of `bytes`.
    pub runs: Vec<Run>,
    /// Content of all runs that have content.
    pub bytes: Vec<u8>,
}

/// A decoded message of pages, with content that stays in the received buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagesIn<'a> {
    /// Page ranges, in the order of `bytes`.
    pub runs: Vec<Run>,
    /// Content of all runs that have content.
    #[serde(borrow, with = "serde_bytes")]
    pub bytes: &'a [u8],
}

/// A range of consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Process or shared memory that the pages belong to.
    pub space: Space,
    /// First address, or offset in the shared memory.
    pub start: u64,
    /// Length of the range, bytes.
    pub length: u64,
    /// Content of the pages.
    pub content: Content,
}

/// Address space or shared memory of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Space {
    /// A process, by index.
    Process(u32),
    /// Shared memory, by index.
    Shared(u32),
}

/// Content of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// The next `length` bytes of the message.
    Bytes,
    /// Content of a new mapping: zeros, or the file.
    Fresh,
}

impl Pages {
    /// Returns a message for [`PagesIn::read`] in two parts. The second part is `self.bytes` itself, so that content is
    /// not copied.
    ///
    /// # Errors
    /// [`Error::Image`] if the message is too large.
    pub fn into_message(self) -> Result<(Vec<u8>, Vec<u8>)> {
        // The encoding of a byte string starts with its length.
        let front = postcard::to_stdvec(&(&self.runs, self.bytes.len()));
        let front = front.map_err(|_| Error::Image("it cannot be encoded"))?;
        if front.len() + self.bytes.len() > MESSAGE_MAX {
            return Err(Error::Image("too large"));
        }
        Ok((front, self.bytes))
    }
}

impl<'a> PagesIn<'a> {
    /// Decodes and checks a message from an untrusted peer.
    ///
    /// # Errors
    /// [`Error::Image`] names the invalid value.
    pub fn read(message: &'a [u8]) -> Result<Self> {
        let (pages, rest): (Self, _) =
            postcard::take_from_bytes(message).map_err(|_| Error::Image("it does not parse"))?;
        if !rest.is_empty() || message.len() > MESSAGE_MAX {
            return Err(Error::Image("bytes behind its end"));
        }
        validate::check_pages(&pages.runs, pages.bytes.len())?;
        Ok(pages)
    }

    /// Groups neighbouring runs of the same space and kind, each group with the content of all its runs. The iterator
    /// stops where bytes are missing.
    pub fn alike(&self) -> impl Iterator<Item = (&[Run], &'a [u8])> {
        let mut rest = self.bytes;
        let groups = (self.runs).chunk_by(|a, b| (a.space, a.content) == (b.space, b.content));
        groups.map_while(move |runs| {
            let lengths = runs.iter().map(Run::bytes);
            let length = lengths.fold(0, u64::saturating_add);
            let (here, after) = rest.split_at_checked(usize::try_from(length).ok()?)?;
            rest = after;
            Some((runs, here))
        })
    }
}

impl Run {
    /// Returns the size of the run's content, bytes.
    fn bytes(&self) -> u64 {
        match self.content {
            Content::Bytes => self.length,
            Content::Fresh => 0,
        }
    }
}

/// Returns each run of a group with its content, if it has any. The iterator stops where bytes are missing.
pub(crate) fn each<'a>(
    runs: &'a [Run],
    bytes: &'a [u8],
) -> impl Iterator<Item = (Run, Option<&'a [u8]>)> {
    let mut rest = bytes;
    runs.iter().map_while(move |run| {
        let length = usize::try_from(run.bytes()).ok()?;
        let (here, after) = rest.split_at_checked(length)?;
        rest = after;
        let has = run.content == Content::Bytes;
        Some((*run, has.then_some(here)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(space: Space, page: u64, content: Content) -> Run {
        Run {
            space,
            start: page << 12,
            length: 1 << 12,
            content,
        }
    }

    #[test]
    fn neighbours_that_are_alike_come_together_with_their_content() {
        let process = Space::Process(0);
        let runs = vec![
            run(process, 1, Content::Bytes),
            run(process, 7, Content::Bytes),
            run(process, 8, Content::Fresh),
            run(process, 9, Content::Bytes),
            run(Space::Shared(0), 1, Content::Bytes),
        ];
        let bytes: Vec<u8> = (1..=4).flat_map(|number| vec![number; 1 << 12]).collect();
        let (mut message, content) = Pages { runs, bytes }.into_message().unwrap();
        message.extend(content);
        let pages = PagesIn::read(&message).unwrap();
        let groups: Vec<(usize, Vec<u8>)> = pages
            .alike()
            .map(|(runs, bytes)| (runs.len(), bytes.iter().step_by(1 << 12).copied().collect()))
            .collect();
        let expected = [(2, vec![1, 2]), (1, vec![]), (1, vec![3]), (1, vec![4])];
        assert_eq!(groups, expected);
        let (first, bytes) = pages.alike().next().unwrap();
        let each: Vec<Option<u8>> = each(first, bytes)
            .map(|(_, bytes)| bytes.map(|bytes| bytes[0]))
            .collect();
        assert_eq!(each, [Some(1), Some(2)]);
    }

    #[test]
    fn what_has_too_few_bytes_ends_early() {
        let runs = vec![run(Space::Process(0), 1, Content::Bytes); 2];
        let bytes = vec![0; 1 << 12];
        let pages = PagesIn {
            runs: runs.clone(),
            bytes: &bytes,
        };
        assert_eq!(pages.alike().count(), 0);
        let (mut message, content) = Pages { runs, bytes }.into_message().unwrap();
        message.extend(content);
        assert!(PagesIn::read(&message).is_err());
    }
}
