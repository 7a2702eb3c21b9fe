//! The rules of RFC 5352 and 5353 one by one: one registrar, with the other sides of its associations played by the
//! test.

mod addresses;
mod asap_rules;
mod distances;
mod enrp_rules;
mod limits;
mod refresh;
mod registration_cache;
mod resolution_cache;
mod rsplib_traces;
mod security;
mod subscriptions;
mod test_bench;
