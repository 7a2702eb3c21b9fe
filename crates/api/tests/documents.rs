//! Checks that code in the documents equals the compiled examples.

#[test]
fn handoff_guide_contains_the_counter_example() {
    let guide = include_str!("../../../docs/handoff.md");
    let example = include_str!("../examples/counter.rs");
    assert!(
        guide.contains(&format!("```rust\n{example}```\n")),
        "copy examples/counter.rs into docs/handoff.md"
    );
}
