//! Deliberate faults: what the oracles must find.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Users keep their cookies to themselves.
    NoEcho,
    /// Users get their first cookie only.
    OldCookie,
    /// Elements are not woken.
    ElementSleeps,
    /// Users are not woken.
    UserSleeps,
    /// Users do not hear that links are lost.
    UserDeaf,
    /// Elements do not hear registrars' keep-alives.
    ElementDeaf,
}

pub const ALL: [Fault; 6] = [
    Fault::NoEcho,
    Fault::OldCookie,
    Fault::ElementSleeps,
    Fault::UserSleeps,
    Fault::UserDeaf,
    Fault::ElementDeaf,
];
