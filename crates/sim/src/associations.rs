//! Associations like SCTP's between the nodes of a simulation: ordered, reliable while they last, with a four-way
//! handshake (RFC 9260 section 5.1) whose third packet already carries messages.
//!
//! A world implements [`AssociationWorld`]: the required methods say how long packets travel, which nodes live, and how
//! an end reacts to an event; the provided methods keep the associations. [`pools`](crate::pools) is one such world,
//! with the load of paper 004; the tests of this crate have others.

use crate::event_queue::FutureEvents;
use crate::time::Time;

/// The number of a node in its world.
pub type NodeNumber = u32;

/// The number of an association in its world.
pub type AssociationNumber = u32;

/// An end of an association; 0 is the initiator, 1 the other end.
pub type AssociationSide = u8;

/// An event at one end of an association, for [`AssociationWorld::handle_association_event`].
#[derive(Debug, Clone)]
pub enum AssociationEvent<M> {
    /// The handshake reaches the step at which this end has the association.
    Up {
        /// The association that comes up.
        association: AssociationNumber,
        /// The end that has the association.
        side: AssociationSide,
    },
    /// This end notices that the association has ended, or that the handshake has failed.
    Lost {
        /// The association that is lost.
        association: AssociationNumber,
        /// The end that notices.
        side: AssociationSide,
    },
    /// A message arrives.
    Deliver {
        /// The association that carries the message.
        association: AssociationNumber,
        /// The receiving end.
        side: AssociationSide,
        /// The message that arrives.
        message: M,
    },
    /// Messages have waited for the transport's timeout: both ends give up, unless the messages have left since.
    Break {
        /// The association whose messages have waited.
        association: AssociationNumber,
    },
}

/// An association. `D` is the data that the world keeps with it, `M` its message.
#[derive(Debug)]
pub struct Association<D, M> {
    /// The two nodes, the initiator first.
    pub ends: [NodeNumber; 2],
    /// The world's data.
    pub data: D,
    /// Arrival time of the last message that each end sent.
    last_arrivals: [Time; 2],
    /// True for each end that knows the association.
    is_up: [bool; 2],
    is_open: bool,
    /// Messages that cannot be sent, in order, with their senders.
    queued: Vec<(AssociationSide, M)>,
    handshake_round_trip: Time,
}

impl<D, M> Association<D, M> {
    /// Returns the node at an end.
    #[must_use]
    pub fn end(&self, side: AssociationSide) -> NodeNumber {
        self.ends[usize::from(side)]
    }

    /// Returns the end at which a node is, if any.
    #[must_use]
    pub fn side_of(&self, node: NodeNumber) -> Option<AssociationSide> {
        let position = self.ends.iter().position(|end| *end == node)?;
        Some(position as AssociationSide)
    }

    /// Returns true if this end has completed the handshake and has not learned of an end of the association.
    #[must_use]
    pub fn is_up(&self, side: AssociationSide) -> bool {
        self.is_up[usize::from(side)]
    }

    /// Returns true unless an end has ended the association.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Returns the round trip time that the handshake measured; 0 if the handshake failed.
    #[must_use]
    pub fn handshake_round_trip(&self) -> Time {
        self.handshake_round_trip
    }

    /// Returns the arrival time of a message that would arrive at `arrival`, not before earlier messages.
    fn arrival_in_order(&mut self, from: AssociationSide, arrival: Time) -> Time {
        let last = &mut self.last_arrivals[usize::from(from)];
        *last = arrival.max(*last);
        *last
    }
}

/// A world whose nodes communicate over associations.
pub trait AssociationWorld {
    /// Data kept with each association.
    type Data;
    /// A message that the associations carry.
    type Message: Clone;
    /// An event of the world.
    type Event: From<AssociationEvent<Self::Message>>;

    /// Returns the present virtual time.
    fn now(&self) -> Time;

    /// Returns the queue of future events.
    fn queue(&mut self) -> &mut FutureEvents<Self::Event>;

    /// Returns all associations that ever were, by number.
    fn associations(&mut self) -> &mut Vec<Association<Self::Data, Self::Message>>;

    /// Returns true if a node is alive.
    fn is_alive(&self, node: NodeNumber) -> bool;

    /// Returns the time after which the transport gives up without arrivals.
    fn association_timeout(&self) -> Time;

    /// Returns the arrival time of a packet that is sent at `at`, from the first of `ends` to the second; none if no
    /// packet can arrive. A packet without message belongs to the transport itself.
    fn arrival(
        &mut self,
        at: Time,
        ends: (NodeNumber, NodeNumber),
        message: Option<&Self::Message>,
    ) -> Option<Time>;

    /// Handles the step of the handshake at which an end has the association.
    fn handle_up(&mut self, association: AssociationNumber, side: AssociationSide);

    /// Handles an end's notice that the association has ended; if the end was not up, that the handshake has failed.
    fn handle_lost(&mut self, association: AssociationNumber, side: AssociationSide, was_up: bool);

    /// Handles the arrival of a message at an end.
    fn handle_message(
        &mut self,
        association: AssociationNumber,
        side: AssociationSide,
        message: &Self::Message,
    );

    /// Returns how often a message is sent: once, unless a full buffer drops messages or a daemon repeats them.
    #[inline]
    fn copies(&mut self, _association: AssociationNumber, _from: AssociationSide) -> usize {
        1
    }

    /// Returns true if the host of a dead node refuses this attempt to connect; otherwise no answer comes.
    #[inline]
    fn refuses_connection(&mut self, _to: NodeNumber) -> bool {
        true
    }

    /// Starts an association; [`AssociationEvent::Up`] or [`AssociationEvent::Lost`] follows. The initiator may send
    /// messages at once: they travel with the third packet of the handshake.
    fn associate(
        &mut self,
        from: NodeNumber,
        to: NodeNumber,
        data: Self::Data,
    ) -> AssociationNumber {
        let association = self.associations().len() as AssociationNumber;
        let now = self.now();
        let mut at = Some(now);
        let mut arrivals = [Time::ZERO; 4];
        for (way, arrival) in arrivals.iter_mut().enumerate() {
            let ends = if way % 2 == 0 { (from, to) } else { (to, from) };
            at = at.and_then(|at| self.arrival(at, ends, None));
            *arrival = at.unwrap_or_default();
        }
        let [_, second, third, fourth] = arrivals;
        let mut new = Association {
            ends: [from, to],
            data,
            last_arrivals: [Time::ZERO; 2],
            is_up: [false; 2],
            is_open: true,
            queued: Vec::new(),
            handshake_round_trip: Time::ZERO,
        };
        let failed = AssociationEvent::Lost {
            association,
            side: 0,
        };
        if at.is_none() {
            let timeout = now + self.association_timeout();
            self.queue().push(timeout, failed.into());
        } else if self.is_alive(to) {
            new.last_arrivals = [third, fourth];
            new.handshake_round_trip = second - now;
            for (at, side) in [(third, 1), (fourth, 0)] {
                let up = AssociationEvent::Up { association, side };
                self.queue().push(at, up.into());
            }
        } else if self.refuses_connection(to) {
            self.queue().push(second, failed.into());
        }
        self.associations().push(new);
        association
    }

    /// Sends a message from an end. The message waits while no packet can arrive, and is lost after the association has
    /// ended.
    #[inline]
    fn transmit(
        &mut self,
        association: AssociationNumber,
        from: AssociationSide,
        message: Self::Message,
    ) {
        let state = &self.associations()[association as usize];
        if !state.is_open {
            return;
        }
        let (side, must_wait) = (1 - from, !state.queued.is_empty());
        let ends = (state.end(from), state.end(side));
        let copies = self.copies(association, from);
        if copies == 0 {
            return;
        }
        let now = self.now();
        let arrival = match must_wait {
            true => None,
            false => self.arrival(now, ends, Some(&message)),
        };
        let Some(arrival) = arrival else {
            if !must_wait {
                let timeout = now + self.association_timeout();
                let event = AssociationEvent::Break { association };
                self.queue().push(timeout, event.into());
            }
            let state = &mut self.associations()[association as usize];
            return state.queued.push((from, message));
        };
        let arrival = self.associations()[association as usize].arrival_in_order(from, arrival);
        for _ in 1..copies {
            let deliver = AssociationEvent::Deliver {
                association,
                side,
                message: message.clone(),
            };
            self.queue().push(arrival, deliver.into());
        }
        let deliver = AssociationEvent::Deliver {
            association,
            side,
            message,
        };
        self.queue().push(arrival, deliver.into());
    }

    /// Sends the waiting messages that can be sent again.
    fn send_queued(&mut self) {
        for association in 0..self.associations().len() {
            let queued = std::mem::take(&mut self.associations()[association].queued);
            for (from, message) in queued {
                self.transmit(association as AssociationNumber, from, message);
            }
        }
    }

    /// Ends an association because one end closes it. Messages sent earlier still arrive; then the other end notices.
    fn close(&mut self, association: AssociationNumber, side: AssociationSide) {
        self.close_after(association, side, Time::ZERO);
    }

    /// Ends an association because one end is dead; the other end notices `notice_delay` later than a regular close.
    fn close_after(
        &mut self,
        association: AssociationNumber,
        side: AssociationSide,
        notice_delay: Time,
    ) {
        let state = &mut self.associations()[association as usize];
        if !state.is_open {
            return;
        }
        let other = 1 - side;
        let ends = (state.end(side), state.end(other));
        let last = state.last_arrivals[usize::from(side)];
        let now = self.now();
        let arrival = self.arrival(now, ends, None);
        let timeout = now + self.association_timeout();
        let at = arrival.unwrap_or(timeout).max(last) + notice_delay;
        let mut notices = [None; 2];
        notices[usize::from(other)] = Some(at);
        self.end_association(association, notices);
    }

    /// Ends all associations of a node that dies. `notice_delay` returns the additional time until the other end of
    /// each notices.
    fn close_all(&mut self, node: NodeNumber, mut notice_delay: impl FnMut(&mut Self) -> Time)
    where
        Self: Sized,
    {
        for association in 0..self.associations().len() {
            let state = &self.associations()[association];
            if let Some(side) = state.side_of(node).filter(|_| state.is_open) {
                let delay = notice_delay(self);
                self.close_after(association as AssociationNumber, side, delay);
            }
        }
    }

    /// Ends an association. Each end with a time notices at that time; an end without one ends the association itself.
    fn end_association(&mut self, association: AssociationNumber, notices: [Option<Time>; 2]) {
        let state = &mut self.associations()[association as usize];
        if !state.is_open {
            return;
        }
        state.is_open = false;
        for (notice, is_up) in notices.iter().zip(&mut state.is_up) {
            *is_up &= notice.is_some();
        }
        for (side, notice) in (0..).zip(notices) {
            if let Some(at) = notice {
                let lost = AssociationEvent::Lost { association, side };
                self.queue().push(at, lost.into());
            }
        }
    }

    /// Handles an event of an association.
    #[inline]
    fn handle_association_event(&mut self, event: AssociationEvent<Self::Message>) {
        match event {
            AssociationEvent::Up { association, side } => {
                let state = &mut self.associations()[association as usize];
                if state.is_open {
                    state.is_up[usize::from(side)] = true;
                    self.handle_up(association, side);
                }
            }
            AssociationEvent::Lost { association, side } => {
                let state = &mut self.associations()[association as usize];
                let was_up = std::mem::replace(&mut state.is_up[usize::from(side)], false);
                state.is_open = false;
                self.handle_lost(association, side, was_up);
            }
            AssociationEvent::Deliver {
                association,
                side,
                message,
            } => {
                if self.associations()[association as usize].is_up(side) {
                    self.handle_message(association, side, &message);
                }
            }
            AssociationEvent::Break { association } => {
                if !self.associations()[association as usize].queued.is_empty() {
                    let now = Some(self.now());
                    self.end_association(association, [now, now]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A world of node 0 and node 1, between which a packet travels for 10 ms.
    #[derive(Default)]
    struct TwoNodes {
        now: Time,
        queue: FutureEvents<AssociationEvent<u32>>,
        associations: Vec<Association<(), u32>>,
        dead: Option<NodeNumber>,
        is_cut: bool,
        /// Time in milliseconds and description of each event at an end.
        seen: Vec<(u64, String)>,
    }

    fn ms(ms: u64) -> Time {
        Time::from_micros(ms * 1_000)
    }

    impl TwoNodes {
        fn run(&mut self, end: u64) {
            while let Some((at, event)) = self.queue.pop_until(ms(end)) {
                self.now = at;
                self.handle_association_event(event);
            }
            self.now = ms(end);
        }

        fn record(&mut self, what: String) {
            self.seen.push((self.now.0 / 1_000_000, what));
        }

        /// Returns the events since the last call.
        fn take_seen(&mut self) -> Vec<(u64, String)> {
            std::mem::take(&mut self.seen)
        }
    }

    impl AssociationWorld for TwoNodes {
        type Data = ();
        type Message = u32;
        type Event = AssociationEvent<u32>;

        fn now(&self) -> Time {
            self.now
        }

        fn queue(&mut self) -> &mut FutureEvents<AssociationEvent<u32>> {
            &mut self.queue
        }

        fn associations(&mut self) -> &mut Vec<Association<(), u32>> {
            &mut self.associations
        }

        fn is_alive(&self, node: NodeNumber) -> bool {
            self.dead != Some(node)
        }

        fn association_timeout(&self) -> Time {
            ms(1_000)
        }

        fn arrival(
            &mut self,
            at: Time,
            _: (NodeNumber, NodeNumber),
            _: Option<&u32>,
        ) -> Option<Time> {
            (!self.is_cut).then_some(at + ms(10))
        }

        fn handle_up(&mut self, _: AssociationNumber, side: AssociationSide) {
            self.record(format!("{side} up"));
        }

        fn handle_lost(&mut self, _: AssociationNumber, side: AssociationSide, was_up: bool) {
            self.record(format!("{side} lost {was_up}"));
        }

        fn handle_message(&mut self, _: AssociationNumber, side: AssociationSide, message: &u32) {
            self.record(format!("{side} gets {message}"));
        }
    }

    fn events<const COUNT: usize>(events: [(u64, &str); COUNT]) -> Vec<(u64, String)> {
        events.map(|(at, what)| (at, what.to_owned())).into()
    }

    #[test]
    fn first_message_travels_with_the_third_packet() {
        let mut world = TwoNodes::default();
        let association = world.associate(0, 1, ());
        world.transmit(association, 0, 7);
        world.run(100);
        let expected = events([(30, "1 up"), (30, "1 gets 7"), (40, "0 up")]);
        assert_eq!(world.take_seen(), expected);
        assert_eq!(world.associations[0].handshake_round_trip(), ms(20));
    }

    #[test]
    fn dead_node_refuses_and_separated_node_does_not_answer() {
        let mut world = TwoNodes {
            dead: Some(1),
            ..TwoNodes::default()
        };
        world.associate(0, 1, ());
        world.run(100);
        assert_eq!(world.take_seen(), events([(20, "0 lost false")]));
        world.is_cut = true;
        world.associate(0, 1, ());
        world.run(2_000);
        assert_eq!(world.take_seen(), events([(1_100, "0 lost false")]));
    }

    #[test]
    fn messages_arrive_before_the_close() {
        let mut world = TwoNodes::default();
        let association = world.associate(0, 1, ());
        world.run(100);
        world.take_seen();
        world.transmit(association, 1, 1);
        world.transmit(association, 1, 2);
        world.close(association, 1);
        world.transmit(association, 0, 3);
        world.run(200);
        let expected = events([(110, "0 gets 1"), (110, "0 gets 2"), (110, "0 lost true")]);
        assert_eq!(world.take_seen(), expected);
    }

    #[test]
    fn death_is_noticed_after_its_delay() {
        let mut world = TwoNodes::default();
        world.associate(0, 1, ());
        world.run(100);
        world.take_seen();
        world.close_all(0, |_| ms(50));
        world.run(300);
        assert_eq!(world.take_seen(), events([(160, "1 lost true")]));
    }

    #[test]
    fn messages_wait_for_the_network_until_the_timeout() {
        let mut world = TwoNodes::default();
        let association = world.associate(0, 1, ());
        world.run(100);
        world.take_seen();
        world.is_cut = true;
        world.transmit(association, 0, 1);
        world.transmit(association, 0, 2);
        world.run(500);
        world.is_cut = false;
        world.send_queued();
        world.run(2_000);
        let expected = events([(510, "1 gets 1"), (510, "1 gets 2")]);
        assert_eq!(world.take_seen(), expected);
        world.is_cut = true;
        world.transmit(association, 0, 3);
        world.run(4_000);
        let expected = events([(3_000, "0 lost true"), (3_000, "1 lost true")]);
        assert_eq!(world.take_seen(), expected);
    }
}
