//! Memory pages of a tree, in messages of limited size.

use super::{MESSAGE_MAX, validate};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Pages of one message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagesMessage {
    /// Page ranges, in the order of `bytes`.
    pub runs: Vec<PageRun>,
    /// Content of all runs that have content.
    pub bytes: Vec<u8>,
}

/// A decoded message of pages, with content that stays in the received buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BorrowedPages<'a> {
    /// Page ranges, in the order of `bytes`.
    pub runs: Vec<PageRun>,
    /// Content of all runs that have content.
    #[serde(borrow, with = "serde_bytes")]
    pub bytes: &'a [u8],
}

/// A range of consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRun {
    /// Process or shared memory that the pages belong to.
    pub space: MemorySpace,
    /// First address, or offset in the shared memory.
    pub start: u64,
    /// Length of the range, bytes.
    pub length: u64,
    /// Content of the pages.
    pub content: PageContent,
}

/// Address space or shared memory of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemorySpace {
    /// A process, by index.
    Process(u32),
    /// Shared memory, by index.
    Shared(u32),
}

/// Content of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PageContent {
    /// The next `length` bytes of the message.
    Bytes,
    /// Content of a new mapping: zeros, or the file.
    Initial,
}

impl PagesMessage {
    /// Returns a message for [`BorrowedPages::decode`] in two parts. The second part is `self.bytes` itself, so that content is
    /// not copied.
    ///
    /// # Errors
    /// [`Error::Image`] if the message is too large.
    pub fn into_message(self) -> Result<(Vec<u8>, Vec<u8>)> {
        // The encoding of a byte string starts with its length.
        let header = postcard::to_stdvec(&(&self.runs, self.bytes.len()));
        let front = header.map_err(|_| Error::Image("cannot be encoded"))?;
        if front.len() + self.bytes.len() > MESSAGE_MAX {
            return Err(Error::Image("message too large"));
        }
        Ok((front, self.bytes))
    }
}

impl<'a> BorrowedPages<'a> {
    /// Decodes and checks a message from an untrusted peer.
    ///
    /// # Errors
    /// [`Error::Image`] names the invalid value.
    pub fn decode(message: &'a [u8]) -> Result<Self> {
        let (pages, rest): (Self, _) =
            postcard::take_from_bytes(message).map_err(|_| Error::Image("cannot be decoded"))?;
        if !rest.is_empty() || message.len() > MESSAGE_MAX {
            return Err(Error::Image("trailing bytes"));
        }
        validate::check_pages(&pages.runs, pages.bytes.len())?;
        Ok(pages)
    }

    /// Groups neighbouring runs of the same space and kind, each group with the content of all its runs. The iterator
    /// stops where bytes are missing.
    pub fn groups(&self) -> impl Iterator<Item = (&[PageRun], &'a [u8])> {
        let mut rest = self.bytes;
        let groups = (self.runs).chunk_by(|a, b| (a.space, a.content) == (b.space, b.content));
        groups.map_while(move |runs| {
            let lengths = runs.iter().map(PageRun::content_bytes);
            let length = lengths.fold(0, u64::saturating_add);
            let (content, after) = rest.split_at_checked(usize::try_from(length).ok()?)?;
            rest = after;
            Some((runs, content))
        })
    }
}

impl PageRun {
    /// Returns the size of the run's content, bytes.
    fn content_bytes(&self) -> u64 {
        match self.content {
            PageContent::Bytes => self.length,
            PageContent::Initial => 0,
        }
    }
}

/// Returns each run of a group with its content, if it has any. The iterator stops where bytes are missing.
pub(crate) fn runs_with_content<'a>(
    runs: &'a [PageRun],
    bytes: &'a [u8],
) -> impl Iterator<Item = (PageRun, Option<&'a [u8]>)> {
    let mut rest = bytes;
    runs.iter().map_while(move |run| {
        let length = usize::try_from(run.content_bytes()).ok()?;
        let (content, after) = rest.split_at_checked(length)?;
        rest = after;
        let has_content = run.content == PageContent::Bytes;
        Some((*run, has_content.then_some(content)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(space: MemorySpace, page: u64, content: PageContent) -> PageRun {
        PageRun {
            space,
            start: page << 12,
            length: 1 << 12,
            content,
        }
    }

    #[test]
    fn similar_neighbours_are_grouped_with_content() {
        let process = MemorySpace::Process(0);
        let runs = vec![
            run(process, 1, PageContent::Bytes),
            run(process, 7, PageContent::Bytes),
            run(process, 8, PageContent::Initial),
            run(process, 9, PageContent::Bytes),
            run(MemorySpace::Shared(0), 1, PageContent::Bytes),
        ];
        let bytes: Vec<u8> = (1..=4).flat_map(|number| vec![number; 1 << 12]).collect();
        let (mut message, content) = PagesMessage { runs, bytes }.into_message().unwrap();
        message.extend(content);
        let pages = BorrowedPages::decode(&message).unwrap();
        let groups: Vec<(usize, Vec<u8>)> = pages
            .groups()
            .map(|(runs, bytes)| (runs.len(), bytes.iter().step_by(1 << 12).copied().collect()))
            .collect();
        let expected = [(2, vec![1, 2]), (1, vec![]), (1, vec![3]), (1, vec![4])];
        assert_eq!(groups, expected);
        let (first, bytes) = pages.groups().next().unwrap();
        let first_bytes: Vec<Option<u8>> = runs_with_content(first, bytes)
            .map(|(_, bytes)| bytes.map(|bytes| bytes[0]))
            .collect();
        assert_eq!(first_bytes, [Some(1), Some(2)]);
    }

    #[test]
    fn groups_end_where_bytes_are_missing() {
        let runs = vec![run(MemorySpace::Process(0), 1, PageContent::Bytes); 2];
        let bytes = vec![0; 1 << 12];
        let pages = BorrowedPages {
            runs: runs.clone(),
            bytes: &bytes,
        };
        assert_eq!(pages.groups().count(), 0);
        let (mut message, content) = PagesMessage { runs, bytes }.into_message().unwrap();
        message.extend(content);
        assert!(BorrowedPages::decode(&message).is_err());
    }
}
