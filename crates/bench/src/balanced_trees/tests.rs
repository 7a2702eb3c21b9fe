use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Checks order, links and sums of a subtree; collects its keys in order.
fn check_subtree(nodes: &TreeNodes<u32>, node: u32, keys: &mut Vec<u32>) -> u64 {
    if node == NIL {
        return 0;
    }
    let TreeNode {
        children, weight, ..
    } = nodes[node];
    for child in children {
        assert!(child == NIL || nodes[child].parent == node);
    }
    let left = check_subtree(nodes, children[0], keys);
    keys.push(nodes[node].key.expect("a node has a key"));
    let right = check_subtree(nodes, children[1], keys);
    assert_eq!(nodes[node].sum, left + weight + right);
    nodes[node].sum
}

fn check_against_map<B: BalanceScheme>(steps: &[(u32, Option<u64>)]) -> BalancedTree<u32, B> {
    let mut tree = BalancedTree::<u32, B>::new();
    let mut model = BTreeMap::new();
    for &(key, weight) in steps {
        let node = tree.find(&key);
        assert_eq!(node.is_some(), model.contains_key(&key));
        match (weight, node) {
            (Some(weight), Some(node)) => tree.set_weight(node, weight),
            (Some(weight), None) => {
                let node = tree.insert(key, key + 1, weight);
                assert_eq!((tree.key(node), tree.value(node)), (key, key + 1));
            }
            (None, Some(node)) => tree.remove(node),
            (None, None) => {}
        }
        match weight {
            Some(weight) => model.insert(key, weight),
            None => model.remove(&key),
        };
        let mut keys = Vec::new();
        assert_eq!(
            check_subtree(&tree.nodes, tree.nodes.root, &mut keys),
            tree.total_weight()
        );
        assert!(keys.iter().eq(model.keys()));
        let nodes = std::iter::successors(tree.first(), |&node| tree.next(node));
        assert!(nodes.map(|node| tree.key(node)).eq(model.keys().copied()));
        let mut before = 0;
        for (&key, &weight) in model.iter().filter(|&(_, &weight)| weight > 0) {
            assert_eq!(tree.key(tree.node_at_weight(before)), key);
            before += weight;
            assert_eq!(tree.key(tree.node_at_weight(before - 1)), key);
        }
    }
    tree
}

proptest! {
    #[test]
    fn both_trees_behave_like_sorted_maps(steps in prop::collection::vec((0u32..50, prop::option::weighted(0.6, 0u64..5)), 1..150)) {
        let tree = check_against_map::<RedBlack>(&steps);
        RedBlack::check_subtree(&tree.nodes, tree.nodes.root);
        let tree = check_against_map::<Treap>(&steps);
        Treap::check_subtree(&tree.nodes, tree.nodes.root);
    }
}
