//! What an element has not answered yet.

use std::collections::VecDeque;

/// Bytes of messages that are kept to be sent again; the oldest of more are not. Far more than may be under way to an element.
const KEPT_BYTES_MAX: usize = 8 << 20;

/// The account of one session.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// Messages, each of which is answered by one.
    Messages {
        /// The oldest first.
        kept: VecDeque<Vec<u8>>,
        bytes: usize,
        /// Older than those, and not kept.
        dropped: u64,
        /// Not kept when their element was lost.
        lost: u64,
    },
    /// A stream of bytes, or datagrams: what an answer is for cannot be known.
    Bytes {
        /// Something was sent to this element.
        asked: bool,
        /// Something came from it.
        heard: bool,
        /// Something was sent since.
        waits: bool,
        /// An element before left something without an answer.
        lost: bool,
    },
}

impl Unanswered {
    /// With elements that speak this transport.
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

    /// Whether messages are kept apart, and sent again.
    pub(super) fn is_by_message(&self) -> bool {
        matches!(self, Unanswered::Messages { .. })
    }

    /// Something is sent to the element.
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

    /// Something came from the element: a message answers the oldest without an answer.
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

    /// The connection with the element is over; `cut`: while nothing but its answer was waited for. Whether something has no answer.
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

    /// What the next element is to be sent.
    pub(super) fn again(&self) -> impl Iterator<Item = &[u8]> {
        let kept = match self {
            Unanswered::Messages { kept, .. } => Some(kept),
            Unanswered::Bytes { .. } => None,
        };
        kept.into_iter().flatten().map(Vec::as_slice)
    }

    /// What has no answer, in words; none if all has one as far as can be known.
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
        // More than was asked.
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
        // A part of the answer may be missing, though there was some.
        let mut cut = Unanswered::new(false);
        cut.sent(b"ask");
        cut.answered();
        cut.broken(true);
        assert!(cut.what().is_some());
    }
}
