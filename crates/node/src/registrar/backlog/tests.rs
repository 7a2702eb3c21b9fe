use super::super::links::number;
use super::*;
use bytes::Bytes;
use holdfast_proto::registrar::Protocol;

const DELAY: Duration = Duration::from_millis(10);
const MS: Duration = Duration::from_millis(1);

/// Associations with room for a number of messages, and the messages that they took.
#[derive(Default)]
struct Net {
    room: BTreeMap<AssocId, usize>,
    came: BTreeMap<AssocId, Vec<Bytes>>,
    calls: usize,
}

impl Net {
    fn with_room(room: &[usize]) -> Net {
        let room = (1..).map(AssocId).zip(room.iter().copied()).collect();
        Net {
            room,
            ..Net::default()
        }
    }

    fn send(&mut self, assocs: &[AssocId], messages: &[Message], taken: &mut Vec<usize>) {
        self.calls += 1;
        for assoc in assocs {
            let room = self.room.get_mut(assoc).expect("an association");
            let count = messages.len().min(*room);
            *room -= count;
            let data = messages.iter().take(count).map(|each| each.data.clone());
            self.came.entry(*assoc).or_default().extend(data);
            taken.push(count);
        }
    }

    fn take(&mut self, backlog: &mut Backlog, now: Duration) {
        backlog.hand_over(now, &mut |assocs, messages, taken| {
            self.send(assocs, messages, taken);
        });
    }

    /// Returns the numbers of the messages that an association took.
    fn numbers(&self, assoc: u64) -> Vec<u32> {
        let came = self.came.get(&AssocId(assoc)).into_iter().flatten();
        let number = |data: &Bytes| u32::from_be_bytes(data[..4].try_into().expect("four bytes"));
        came.map(number).collect()
    }
}

fn all(count: u64) -> Arc<[AssociationId]> {
    let assocs = (1..=count).map(AssocId);
    assocs.map(|assoc| number(Protocol::Enrp, assoc)).collect()
}

fn message(id: u32, len: usize) -> Message {
    let mut data = id.to_be_bytes().to_vec();
    data.resize(len.max(4), 0);
    Message::new(12, data.into())
}

#[test]
fn updates_that_follow_each_other_go_together() {
    for (one_send, calls) in [(true, 1), (false, 2)] {
        let mut backlog = Backlog::new(DELAY, one_send);
        let mut net = Net::with_room(&[100, 100]);
        let to = all(2);
        // Nothing was sent for a long time, so the first message does not wait.
        backlog.push_all(&to, message(0, 100));
        net.take(&mut backlog, DELAY);
        assert_eq!((net.numbers(1), net.calls), (vec![0], calls));
        for id in 1..5 {
            backlog.push_all(&to, message(id, 100));
            net.take(&mut backlog, DELAY + MS * id);
        }
        assert_eq!((net.numbers(1), net.calls), (vec![0], calls));
        assert_eq!(backlog.next(DELAY), Some(DELAY * 2));
        net.take(&mut backlog, DELAY * 2);
        assert_eq!((net.numbers(2), net.calls), ((0..5).collect(), 2 * calls));
        assert_eq!(backlog.next(DELAY * 2), None);
        // Many messages fill packets anyway, so they do not wait.
        (5..5 + MANY as u32).for_each(|id| backlog.push_all(&to, message(id, 4)));
        net.take(&mut backlog, DELAY * 2);
        assert_eq!(net.numbers(1).len(), 5 + MANY);
    }
}

#[test]
fn what_finds_no_room_waits_and_nothing_overtakes_it() {
    let mut backlog = Backlog::new(DELAY, true);
    let mut net = Net::with_room(&[100, 3]);
    let to = all(2);
    for id in 0..10 {
        backlog.push_all(&to, message(id, 100));
    }
    net.take(&mut backlog, DELAY);
    // A message for one of them alone, and one for all.
    backlog.push(AssocId(2), message(10, 100));
    backlog.push_all(&to, message(11, 100));
    net.take(&mut backlog, DELAY * 3);
    assert_eq!(net.numbers(1), (0..10).chain([11]).collect::<Vec<_>>());
    assert_eq!(net.numbers(2), [0, 1, 2]);
    let now = DELAY * 4;
    assert_eq!(backlog.next(now), Some(now + AGAIN));
    net.room.insert(AssocId(2), 4);
    net.take(&mut backlog, now);
    net.room.insert(AssocId(2), 100);
    net.take(&mut backlog, now);
    assert_eq!(net.numbers(2), (0..12).collect::<Vec<_>>());
    assert_eq!(backlog.next(now), None);
}

#[test]
fn a_message_for_one_comes_after_what_all_got_before() {
    let mut backlog = Backlog::new(DELAY, true);
    let mut net = Net::with_room(&[100, 100]);
    net.take(&mut backlog, DELAY);
    let to = all(2);
    (0..3).for_each(|id| backlog.push_all(&to, message(id, 4)));
    backlog.push(AssocId(2), message(3, 4));
    backlog.push_all(&to, message(4, 4));
    // Too early for the last message, which only `finish` sends.
    net.take(&mut backlog, Duration::ZERO);
    backlog.finish(&mut |assocs, messages, taken| net.send(assocs, messages, taken));
    assert_eq!(net.numbers(1), [0, 1, 2, 4]);
    assert_eq!(net.numbers(2), [0, 1, 2, 3, 4]);
}

#[test]
fn a_peer_that_stays_stuck_holds_requests_up_and_is_given_up() {
    let mut backlog = Backlog::new(DELAY, true);
    let mut net = Net::with_room(&[10_000, 0]);
    let to = all(2);
    let mut fill = |backlog: &mut Backlog, at: Duration, bytes: usize| {
        (0..bytes / 1024).for_each(|id| backlog.push_all(&to, message(id as u32, 1024)));
        net.take(backlog, at);
    };
    fill(&mut backlog, DELAY, LONG);
    assert!(!backlog.is_long() && backlog.give_up(DELAY).is_none());
    fill(&mut backlog, DELAY * 2, 1024 * MANY);
    assert!(backlog.is_long());
    fill(&mut backlog, DELAY * 2 + PATIENCE - MS, 1024);
    assert_eq!(backlog.give_up(DELAY * 2 + PATIENCE - MS), None);
    let late = DELAY * 2 + PATIENCE;
    assert_eq!(backlog.give_up(late), Some(AssocId(2)));
    assert!(!backlog.is_long() && backlog.give_up(late).is_none());
    // Data that the peer itself requests may exceed the limit within less time.
    fill(&mut backlog, late + DELAY, TOO_LONG + 1024);
    assert_eq!(backlog.give_up(late + DELAY), Some(AssocId(2)));
}

#[test]
fn nothing_goes_to_an_association_that_has_the_number_of_one_that_is_gone() {
    let mut backlog = Backlog::new(DELAY, true);
    let mut net = Net::with_room(&[100, 0]);
    let to = all(2);
    net.take(&mut backlog, DELAY);
    backlog.push_all(&to, message(0, 4));
    net.take(&mut backlog, DELAY);
    backlog.push_all(&to, message(1, 4));
    backlog.forget(AssocId(2));
    net.room.insert(AssocId(2), 100);
    net.take(&mut backlog, DELAY * 2);
    assert_eq!((net.numbers(1), net.numbers(2)), (vec![0, 1], vec![]));
}
