//! Data that an element has not answered.

use std::collections::VecDeque;

/// Maximum size of messages kept for sending again, in bytes; the oldest are dropped. Far more than an element has in
/// progress.
const KEPT_BYTES_MAX: usize = 8 << 20;

/// Unanswered data of one session.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// Messages, each answered by one message.
    Messages {
        /// Kept messages, oldest first.
        kept: VecDeque<Vec<u8>>,
        bytes: usize,
        /// Number of older messages that were dropped.
        dropped: u64,
        /// Number of messages that were dropped when their element was lost.
        lost: u64,
    },
    /// A stream of bytes, or datagrams: answers cannot be matched to requests.
    Bytes {
        /// True if data was sent to this element.
        asked: bool,
        /// True if data was received from this element.
        heard: bool,
        /// True if data was sent since the last received data.
        waits: bool,
        /// True if a previous element left data unanswered.
        lost: bool,
    },
}

impl Unanswered {
    /// Creates an empty record; `by_message` is true for transports with messages.
    pub(super) fn new(by_message: bool) -> Unanswered {
        match by_message {
            true => Unanswered::Messages {
                kept: VecDeque::new(),
                bytes: 0,
                dropped: 0,
                lost: 0,
            },
            false => Unanswered::Bytes {
                asked: false,
                heard: false,
                waits: false,
                lost: false,
            },
        }
    }

    /// Returns true if messages are kept separately, and sent again.
    pub(super) fn is_by_message(&self) -> bool {
        matches!(self, Unanswered::Messages { .. })
    }

    /// Records data sent to the element.
    pub(super) fn sent(&mut self, sent: &[u8]) {
        match self {
            Unanswered::Messages {
                kept,
                bytes,
                dropped,
                ..
            } => {
                kept.push_back(sent.to_vec());
                *bytes += sent.len();
                while *bytes > KEPT_BYTES_MAX
                    && let Some(oldest) = kept.pop_front()
                {
                    *bytes -= oldest.len();
                    *dropped += 1;
                }
            }
            Unanswered::Bytes { asked, waits, .. } => (*asked, *waits) = (true, true),
        }
    }

    /// Records data received from the element: a message answers the oldest unanswered one.
    pub(super) fn answered(&mut self) {
        match self {
            Unanswered::Messages { dropped, .. } if *dropped > 0 => *dropped -= 1,
            Unanswered::Messages { kept, bytes, .. } => {
                if let Some(oldest) = kept.pop_front() {
                    *bytes -= oldest.len();
                }
            }
            Unanswered::Bytes { heard, waits, .. } => (*heard, *waits) = (true, false),
        }
    }

    /// Records the end of the connection. `cut`: the connection broke while only answers were awaited. Returns true if
    /// anything is unanswered.
    pub(super) fn broken(&mut self, cut: bool) -> bool {
        match self {
            Unanswered::Messages {
                kept,
                dropped,
                lost,
                ..
            } => {
                let is_left = !kept.is_empty() || *dropped > 0;
                *lost += std::mem::take(dropped);
                is_left
            }
            Unanswered::Bytes {
                asked,
                heard,
                waits,
                lost,
            } => {
                let is_left = *waits || cut;
                *lost |= is_left;
                (*asked, *heard, *waits) = (false, false, false);
                is_left
            }
        }
    }

    /// Returns the messages to send to the next element.
    pub(super) fn again(&self) -> impl Iterator<Item = &[u8]> {
        let kept = match self {
            Unanswered::Messages { kept, .. } => Some(kept),
            Unanswered::Bytes { .. } => None,
        };
        kept.into_iter().flatten().map(Vec::as_slice)
    }

    /// Describes the unanswered data; none if all is answered, as far as can be known.
    pub(super) fn what(&self) -> Option<String> {
        match self {
            Unanswered::Messages {
                kept,
                dropped,
                lost,
                ..
            } => match kept.len() as u64 + dropped + lost {
                0 => None,
                1 => Some("one line has no answer".to_owned()),
                count => Some(format!("{count} lines have no answer")),
            },
            Unanswered::Bytes { lost: true, .. } => {
                Some("what an element had not answered when it was lost is not sent again".into())
            }
            Unanswered::Bytes { asked, heard, .. } => {
                (*asked && !*heard).then(|| "no answer came".to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(unanswered: &Unanswered) -> Vec<&[u8]> {
        unanswered.again().collect()
    }

    #[test]
    fn an_answer_is_the_oldest_message_s() {
        let mut own = Unanswered::new(true);
        for line in [b"1", b"2", b"3"] {
            own.sent(line);
        }
        own.answered();
        assert!(own.broken(false));
        assert_eq!(again(&own), [b"2", b"3"]);
        assert_eq!(own.what().unwrap(), "2 lines have no answer");
        own.answered();
        own.answered();
        assert_eq!(own.what(), None);
        // More answers than requests.
        own.answered();
        own.sent(b"4");
        assert_eq!(again(&own), [b"4"]);
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_rest_is_not_forgotten() {
        let mut own = Unanswered::new(true);
        let line = vec![7; 1 << 20];
        for _ in 0..10 {
            own.sent(&line);
        }
        assert_eq!(again(&own).len(), 8);
        own.answered();
        assert_eq!(again(&own).len(), 8, "it was for the first, which is gone");
        own.broken(false);
        for _ in 0..8 {
            own.answered();
        }
        assert!(again(&own).is_empty());
        assert_eq!(own.what().unwrap(), "one line has no answer");
    }

    #[test]
    fn of_a_stream_nothing_is_kept_and_the_loss_is_known() {
        let mut own = Unanswered::new(false);
        assert_eq!(own.what(), None);
        own.sent(b"ask");
        assert_eq!(own.what().unwrap(), "no answer came");
        own.answered();
        own.sent(b"ask again");
        assert_eq!((own.what(), again(&own).len()), (None, 0));
        assert!(own.broken(false));
        own.sent(b"ask the next");
        own.answered();
        assert!(own.what().unwrap().contains("not sent again"));
        assert!(!own.broken(false), "that one has answered");
        // A part of the answer may be missing, although another part arrived.
        let mut cut = Unanswered::new(false);
        cut.sent(b"ask");
        cut.answered();
        cut.broken(true);
        assert!(cut.what().is_some());
    }
}
