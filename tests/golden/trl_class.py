"""An environment class as TRL's trainers take, for the golden data and for the test."""

PRICES = {"apple": 2, "pear": 3}


class Shop:
    """Spends a budget; worth what was bought."""

    def reset(self, budget, **columns):
        self.left, self.basket = budget, []
        return f" You have {budget} coins."

    def buy(self, item: str, count: int = 1) -> str:
        """
        Buys an item.

        Args:
            item: What to buy.
            count: How many of it.
        """
        if item not in PRICES:
            raise ValueError(f"there is no {item}")
        cost = PRICES[item] * count
        if cost > self.left:
            return "too expensive"
        self.left -= cost
        self.basket += [item] * count
        return f"{self.left} left"

    async def prices(self) -> dict:
        """
        Lists the prices.
        """
        return PRICES

    def get_reward(self) -> float:
        return len(self.basket) / 4

    def _hidden(self):
        raise AssertionError("no tool")


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


# Episodes: turns of the policy, each its calls, and none for an answer; and how many may call.
EPISODES = [
    ([[call("buy", item="apple", count=2)], [call("prices")], []], None),
    ([[]], None),
    ([[call("buy", item="plum"), call("buy", item="pear"), call("sell", item="pear")], []], None),
    ([[call("buy")], [call("buy", item="pear", count=9)], [call("_hidden")], []], None),
    ([[call("buy", item="pear")], [call("buy", item="pear")], [call("buy", item="pear")]], 2),
    ([[call("prices"), call("buy", item="apple")], []], None),
]
ROW = {"text": "Fill the basket.", "budget": 9}
